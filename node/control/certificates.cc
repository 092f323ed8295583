#include <weir/node/control/certificates.h>

#include <array>
#include <cstdlib>
#include <utility>

#include <fmt/format.h>
#include <fmt/ranges.h>

namespace weir::node {
namespace {

constexpr Nanos kLookEvery = 2 * kSecond;
/// How long before its end a certificate is an alarm; each once.
constexpr std::array<Nanos, 4> kAlarms = {30 * kDay, 7 * kDay, kDay, 0};

rpc::TlsOptions tls_options(const std::string& use, const TlsConfig& config) {
  rpc::TlsOptions out;
  out.cert = config.cert;
  out.key = config.key;
  out.ca = config.ca;
  out.crl = config.crl;
  out.client_certificate = config.client_certificate;
  out.tls12 = config.tls12;
  if (use == "http" || use == "admin") out.alpn = {"http/1.1"};
  if (use == "grpc") out.alpn = {"h2"};
  return out;
}

int nearness(Nanos left) {
  int level = 0;
  for (const Nanos bound : kAlarms) level += left <= bound ? 1 : 0;
  return level;
}

}  // namespace

std::string unusable_tls(const NodeConfig& config) {
  for (const auto& [use, one] : config.tls) {
    std::string error;
    if (rpc::TlsContext::make(tls_options(use, one), error) == nullptr) {
      return "tls." + use + ": " + error;
    }
  }
  return {};
}

Certificates::Certificates(const NodeConfig& config, Log& log, rpc::Background& background)
    : log_(log), background_(background) {
  for (const auto& [use, one] : config.tls) {
    rpc::TlsOptions options = tls_options(use, one);
    options.on_failure = [&log, use = use](const std::string& who, const std::string& why) {
      log.warn("tls_refused", {{"use", use}, {"who", who}, {"why", why}});
    };
    std::string error;
    std::shared_ptr<rpc::TlsContext> made = rpc::TlsContext::make(std::move(options), error);
    if (made == nullptr) {
      error_ = "tls." + use + ": " + error;
      return;
    }
    all_[use].context = std::move(made);
  }
}

std::shared_ptr<rpc::TlsContext> Certificates::of(std::string_view use) const {
  const auto at = all_.find(use);
  return at == all_.end() ? nullptr : at->second.context;
}

void Certificates::look(Nanos wall) {
  if (all_.empty() || std::abs(wall - looked_at_) < kLookEvery) return;
  looked_at_ = wall;
  alarm(wall);
  reread();
}

void Certificates::reread() {
  if (busy_ || all_.empty()) return;
  busy_ = true;
  struct Result {
    std::string use;
    std::shared_ptr<rpc::TlsContext> context;
    rpc::TlsContext::Refreshed refreshed{};
    std::string why;
  };
  auto results = std::make_shared<std::vector<Result>>();
  for (const auto& [use, one] : all_) results->push_back({use, one.context, {}, {}});
  background_.run(
      [results] {
        for (Result& one : *results) one.refreshed = one.context->refresh(one.why);
      },
      [this, results] {
        busy_ = false;
        for (const Result& one : *results) told(one.use, one.refreshed, one.why);
      });
}

void Certificates::told(const std::string& use, rpc::TlsContext::Refreshed result,
                        const std::string& why) {
  One& one = all_.find(use)->second;
  one.refused = result == rpc::TlsContext::Refreshed::refused;
  if (!one.refused) {
    one.why.clear();
    if (result == rpc::TlsContext::Refreshed::taken) {
      log_.info("certificates_taken", {{"use", use}});
    }
  } else if (one.why != why) {
    one.why = why;
    log_.error("certificates_refused", {{"use", use}, {"why", why}});
  }
}

void Certificates::alarm(Nanos wall) {
  for (auto& [use, one] : all_) {
    for (const rpc::TlsCertificate& certificate : one.context->certificates()) {
      const Nanos left = certificate.expires - wall;
      const int level = nearness(left);
      int& told = one.alarmed[certificate.file];
      if (level > told) {
        const std::string names = fmt::format("{}", fmt::join(certificate.names, ", "));
        log_.write(left <= 0 ? LogLevel::error : LogLevel::warn,
                   left <= 0 ? "certificate_expired" : "certificate_expires",
                   {{"use", use},
                    {"file", certificate.file},
                    {"names", names},
                    {"expires", format_rfc3339(certificate.expires)},
                    {"days", left / kDay}});
      }
      told = level;
    }
  }
}

std::vector<Certificates::Use> Certificates::uses() const {
  std::vector<Use> out;
  for (const auto& [use, one] : all_) {
    out.push_back({use, one.context->counters(), !one.refused, one.context->certificates()});
  }
  return out;
}

}  // namespace weir::node
