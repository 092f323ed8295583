#include <weir/node/cli/replay.h>

#include <algorithm>
#include <array>
#include <deque>
#include <limits>
#include <tuple>
#include <unordered_map>

#include <weir/crdt/ids.h>
#include <weir/limits/limiter.h>
#include <weir/node/engine/engine.h>

namespace weir::node {
namespace {

constexpr Nanos kSweepInterval = 10 * kMinute;
constexpr std::uint64_t kProgressRequests = 1u << 16;

/// Nodes of all regions, and a network between them that loses nothing and takes no time.
class Regions {
 public:
  Regions(const ReplayOptions& options, std::size_t max_series, Nanos start) {
    for (std::uint32_t i = 0; i < options.regions; ++i) {
      engines_.push_back(
          std::make_unique<Engine>(engine_options(options, max_series, i), nullptr, events(i)));
      std::string error;
      engines_.back()->start(start, {}, error);  // fails only with a store
    }
    connect(start);
  }

  void check(std::uint32_t region, const Request& request, Nanos now, Decision& out) {
    engines_[region]->check(request, now, out);
  }

  /// Requests that the candidate of a rule would have denied.
  std::uint64_t candidate_denied(std::uint32_t rule) const {
    std::uint64_t sum = 0;
    for (const auto& engine : engines_) sum += engine->limiter().counters(rule).candidate_denied;
    return sum;
  }

  /// Everything counted so far is known everywhere afterwards.
  void exchange(Nanos now) {
    // A replica pauses after a few messages until they are acknowledged, hence the repetition.
    for (bool news = true; news;) {
      for (auto& engine : engines_) engine->pump(now);
      if (reconnect_) connect(now);
      news = !wire_.empty();
      deliver(now);
    }
  }

 private:
  struct InFlight {
    std::uint32_t from = 0;
    std::uint32_t to = 0;
    crdt::Incarnation incarnation;
    crdt::Message message;
  };

  EngineOptions engine_options(const ReplayOptions& options, std::size_t max_series,
                               std::uint32_t self) {
    EngineOptions out;
    out.rules = options.rules;
    out.max_series = max_series;
    out.sweep_interval = kSweepInterval;
    out.fresh_incarnation = [this] { return crdt::Incarnation{1, ++incarnations_}; };
    for (std::uint32_t i = 0; i < options.regions; ++i) {
      crdt::Member member{"region-" + std::to_string(i + 1), "node"};
      if (i == self) {
        out.replica.self = member;
      } else {
        out.replica.peers.push_back(member);
      }
    }
    out.replica.sync_interval = 0;  // at every pump, that is at every exchange
    // Nothing is ever lost, so there is nothing to repair.
    out.replica.anti_entropy_interval = 366 * kDay;
    return out;
  }

  EngineEvents events(std::uint32_t self) {
    EngineEvents out;
    out.send = [this, self](crdt::PeerIndex peer, const crdt::Message& message) {
      wire_.push_back(
          {self, peer < self ? peer : peer + 1, engines_[self]->replica().incarnation(), message});
    };
    out.reincarnated = [this](const crdt::Incarnation&) { reconnect_ = true; };
    out.log = [](const std::string&, const std::string&) {};
    return out;
  }

  static crdt::PeerIndex peer_index(std::uint32_t self, std::uint32_t other) {
    return other < self ? other : other - 1;
  }

  void connect(Nanos now) {
    reconnect_ = false;
    for (std::uint32_t i = 0; i < engines_.size(); ++i) {
      for (std::uint32_t j = 0; j < engines_.size(); ++j) {
        if (i == j) continue;
        engines_[i]->peer_up(peer_index(i, j), engines_[j]->replica().incarnation(), now);
      }
    }
    deliver(now);
  }

  void deliver(Nanos now) {
    while (!wire_.empty()) {
      const InFlight next = std::move(wire_.front());
      wire_.pop_front();
      engines_[next.to]->receive(peer_index(next.to, next.from), next.incarnation, next.message,
                                 now);
    }
  }

  std::vector<std::unique_ptr<Engine>> engines_;
  std::deque<InFlight> wire_;
  std::uint64_t incarnations_ = 0;
  bool reconnect_ = false;
};

/// What became of one rule's one key.
struct Tally {
  std::uint32_t rule = 0;
  std::size_t example = 0;  // index of a record with this key
  std::uint64_t allowed = 0;
  std::uint64_t allowed_globally = 0;
  std::uint64_t denied = 0;
};

/// The same on every machine, unlike std::hash.
std::uint64_t hash_text(std::string_view text) {
  std::uint64_t hash = text.size();
  for (const char c : text) hash = crdt::mix64(hash, static_cast<std::uint8_t>(c));
  return hash;
}

class Run {
 public:
  Run(const ReplayOptions& options, const RequestLog& log)
      : options_(options),
        log_(log),
        max_series_(log.records().size() * options.rules->rules().size()),
        global_(options.rules, {.max_series = max_series_}) {}

  ReplayReport run() {
    const auto& records = log_.records();
    report_.requests = records.size();
    if (!records.empty()) {
      report_.first = records.front().time;
      report_.last = records.back().time;
      Regions regions(options_, max_series_, report_.first);
      Nanos exchange_at = kNever;  // never while there is nothing new
      Nanos sweep_at = report_.first + kSweepInterval;
      for (std::size_t i = 0; i < records.size(); ++i) {
        const Nanos now = records[i].time;
        if (exchange_at <= now) {
          regions.exchange(exchange_at);
          exchange_at = kNever;
        }
        if (sweep_at <= now) {
          global_.sweep(now - kSecond);
          sweep_at = now + kSweepInterval;
        }
        decide(regions, i);
        if (exchange_at == kNever) exchange_at = next_exchange(now);
        if (options_.progress && i % kProgressRequests == 0) options_.progress(i);
      }
      for (std::uint32_t i = 0; i < options_.rules->rules().size(); ++i) {
        candidates_denied_.push_back(regions.candidate_denied(i));
      }
    }
    finish();
    return std::move(report_);
  }

 private:
  /// Exchanges are at multiples of the interval, counted from the first request.
  Nanos next_exchange(Nanos now) const {
    const Nanos since = now - report_.first;
    return now - since % options_.sync_interval + options_.sync_interval;
  }

  void decide(Regions& regions, std::size_t index) {
    const RequestLog::Record& record = log_.records()[index];
    std::array<Entry, RequestLog::kKeys.size()> entries;
    const std::size_t count = log_.descriptor(record, entries);
    const Request request{options_.domain, std::span(entries).first(count)};
    const std::uint64_t turn =
        options_.spread == Spread::client ? hash_text(log_.value(record.values[0])) : index;
    regions.check(static_cast<std::uint32_t>(turn % options_.regions), request, record.time,
                  decision_);
    global_.check(request, record.time, global_decision_);

    ++(decision_.allowed ? report_.passed : report_.refused);
    if (decision_.statuses.empty()) ++report_.unmatched;
    // Both limiters have the same rules, so the same ones matched.
    for (std::size_t i = 0; i < decision_.statuses.size(); ++i) {
      const RuleStatus& status = decision_.statuses[i];
      auto [at, fresh] = tallies_.try_emplace(global_.series_of(status.rule, request));
      Tally& tally = at->second;
      if (fresh) {
        tally.rule = status.rule;
        tally.example = index;
      }
      ++(status.allowed ? tally.allowed : tally.denied);
      if (global_decision_.statuses[i].allowed) ++tally.allowed_globally;
    }
  }

  void finish() {
    const auto& rules = options_.rules->rules();
    std::vector<RuleOutcome> outcomes(rules.size());
    std::vector<const Tally*> denied;
    for (const auto& [series, tally] : tallies_) {
      RuleOutcome& outcome = outcomes[tally.rule];
      outcome.allowed += tally.allowed;
      outcome.denied += tally.denied;
      outcome.over_admitted += tally.allowed - std::min(tally.allowed, tally.allowed_globally);
      if (tally.denied > 0) denied.push_back(&tally);
    }
    for (std::size_t i = 0; i < rules.size(); ++i) {
      if (rules[i].domain != options_.domain) continue;
      outcomes[i].name = rules[i].name;
      outcomes[i].shadow = rules[i].shadow;
      if (rules[i].candidate)
        outcomes[i].candidate_denied = candidates_denied_.empty() ? 0 : candidates_denied_[i];
      report_.rules.push_back(std::move(outcomes[i]));
    }
    const auto before = [&](const Tally* a, const Tally* b) {
      if (a->denied != b->denied) return a->denied > b->denied;
      if (a->rule != b->rule) return a->rule < b->rule;
      return entries_of(*a) < entries_of(*b);
    };
    const std::size_t top = std::min(options_.top, denied.size());
    std::partial_sort(denied.begin(), denied.begin() + static_cast<std::ptrdiff_t>(top),
                      denied.end(), before);
    for (std::size_t i = 0; i < top; ++i) {
      report_.top_denied.push_back(
          {rules[denied[i]->rule].name, entries_of(*denied[i]), denied[i]->denied});
    }
  }

  std::vector<std::pair<std::string, std::string>> entries_of(const Tally& tally) const {
    std::array<Entry, RequestLog::kKeys.size()> entries;
    const std::size_t count = log_.descriptor(log_.records()[tally.example], entries);
    const Request request{options_.domain, std::span(entries).first(count)};
    std::vector<std::pair<std::string, std::string>> out;
    for (const std::string& key : options_.rules->rules()[tally.rule].key) {
      const std::string_view* value = request.find(key);
      out.emplace_back(key, value == nullptr ? std::string_view{} : *value);
    }
    return out;
  }

  const ReplayOptions& options_;
  const RequestLog& log_;
  const std::size_t max_series_;  // every request may bring a key to every rule
  Limiter global_;
  Decision decision_;
  Decision global_decision_;
  std::unordered_map<crdt::SeriesId, Tally> tallies_;
  std::vector<std::uint64_t> candidates_denied_;  // by rule
  ReplayReport report_;
};

}  // namespace

ReplayReport replay(const ReplayOptions& options, const RequestLog& log) {
  return Run(options, log).run();
}

}  // namespace weir::node
