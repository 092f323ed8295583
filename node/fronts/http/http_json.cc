#include <weir/node/fronts/http/http_json.h>

#include <algorithm>
#include <utility>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

namespace weir::node {
namespace {

using nlohmann::json;
using Ordered = nlohmann::ordered_json;

// Takes the events of one check body. There is no tree in between, so what memory a body takes is
// what its fields may hold. Returning false stops the parser.
class CheckReader final : public nlohmann::json_sax<json> {
 public:
  CheckReader(CheckBody& out, BodyError& error, bool reserve)
      : out_(out), error_(error), reserve_(reserve) {}

  bool finished() const { return place_ == Place::end; }

  bool null() override { return wrong(); }
  bool boolean(bool value) override {
    if (place_ != Place::body || name_ != "over_admission") return wrong();
    out_.over_admission = value;
    return true;
  }
  bool number_integer(number_integer_t) override { return wrong(); }
  bool number_float(number_float_t, const string_t&) override { return wrong(); }
  bool binary(binary_t&) override { return wrong(); }

  bool number_unsigned(number_unsigned_t value) override {
    if (place_ != Place::body) return wrong();
    if (name_ == "timeout_ms" && value <= kMaxTimeoutMs) {
      out_.timeout = static_cast<Nanos>(value) * kMillisecond;
      return true;
    }
    if (name_ != "hits" || value > kMaxHits) return wrong();
    out_.hits = value;
    return true;
  }

  bool string(string_t& value) override {
    if (place_ == Place::body && name_ == "domain") {
      if (value.empty() || value.size() > kMaxDomainText) return wrong();
      out_.domain = std::move(value);
      return true;
    }
    if (place_ == Place::body && name_ == "request_id") {
      if (value.empty() || value.size() > kMaxRequestId) return wrong();
      out_.request_id = std::move(value);
      return true;
    }
    if (place_ == Place::map) {
      if (value.size() > kMaxEntryText) return wrong();
      out_.descriptor.back().second = std::move(value);
      return true;
    }
    if (place_ == Place::entry) {
      if (value.size() > kMaxEntryText || (name_ == "key" && value.empty())) return wrong();
      auto& entry = out_.descriptor.back();
      (name_ == "key" ? entry.first : entry.second) = std::move(value);
      return true;
    }
    return wrong();
  }

  bool start_object(std::size_t) override {
    if (place_ == Place::start) {
      place_ = Place::body;
      return true;
    }
    if (place_ == Place::body && name_ == "descriptor") {
      place_ = Place::map;
      return true;
    }
    if (place_ == Place::list) {
      if (!more()) return false;
      place_ = Place::entry;
      seen_key_ = seen_value_ = false;
      name_.clear();
      return true;
    }
    return wrong();
  }

  bool key(string_t& name) override {
    switch (place_) {
      case Place::body: {
        bool* seen = name == "domain"                   ? &seen_domain_
                     : name == "descriptor"             ? &seen_descriptor_
                     : name == "hits"                   ? &seen_hits_
                     : name == "request_id"             ? &seen_request_id_
                     : name == "over_admission"         ? &seen_over_admission_
                     : name == "timeout_ms" && reserve_ ? &seen_timeout_
                                                        : nullptr;
        if (seen == nullptr) {
          return fail(shown(name),
                      reserve_ ? "unknown field; expected domain, descriptor, hits, request_id, "
                                 "over_admission or timeout_ms"
                               : "unknown field; expected domain, descriptor, hits, request_id or "
                                 "over_admission");
        }
        if (std::exchange(*seen, true)) return fail(name, "repeated field; expected it once");
        name_ = name;
        return true;
      }
      case Place::map:
        if (name.empty() || name.size() > kMaxEntryText) {
          return fail("descriptor", fmt::format("expected keys of 1 to {} bytes", kMaxEntryText));
        }
        if (std::any_of(out_.descriptor.begin(), out_.descriptor.end(),
                        [&](const auto& entry) { return entry.first == name; })) {
          return fail("descriptor." + shown(name), "repeated field; expected it once");
        }
        if (!more()) return false;
        out_.descriptor.back().first = name;
        return true;
      case Place::entry: {
        bool* seen = name == "key" ? &seen_key_ : name == "value" ? &seen_value_ : nullptr;
        if (seen == nullptr) {
          return fail(at_entry() + "." + shown(name), "unknown field; expected key and value");
        }
        if (std::exchange(*seen, true)) {
          return fail(at_entry() + "." + name, "repeated field; expected it once");
        }
        name_ = name;
        return true;
      }
      default:
        return wrong();
    }
  }

  bool end_object() override {
    switch (place_) {
      case Place::entry:
        if (!seen_key_ || !seen_value_) return fail(at_entry(), "expected both key and value");
        place_ = Place::list;
        return true;
      case Place::map:
        place_ = Place::body;
        return true;
      default:
        if (!seen_domain_) return fail("domain", "required field is missing");
        place_ = Place::end;
        return true;
    }
  }

  bool start_array(std::size_t) override {
    if (place_ != Place::body || name_ != "descriptor") return wrong();
    place_ = Place::list;
    return true;
  }

  bool end_array() override {
    place_ = Place::body;
    return true;
  }

  bool parse_error(std::size_t position, const std::string&, const json::exception&) override {
    return fail("", fmt::format("expected JSON in UTF-8; it is broken at byte {}", position));
  }

 private:
  enum class Place { start, body, map, list, entry, end };

  bool fail(std::string field, std::string expected) {
    error_ = {std::move(field), std::move(expected)};
    return false;
  }

  // A value of a kind or size that its place does not take.
  bool wrong() {
    const std::string text = fmt::format("expected a string of at most {} bytes", kMaxEntryText);
    switch (place_) {
      case Place::body:
        if (name_ == "domain") {
          return fail(name_, fmt::format("expected a string of 1 to {} bytes", kMaxDomainText));
        }
        if (name_ == "hits") {
          return fail(name_, fmt::format("expected an integer from 0 to {}", kMaxHits));
        }
        if (name_ == "over_admission") return fail(name_, "expected true or false");
        if (name_ == "timeout_ms") {
          return fail(name_, fmt::format("expected an integer from 0 to {}", kMaxTimeoutMs));
        }
        if (name_ == "request_id") {
          return fail(name_, fmt::format("expected a string of 1 to {} bytes", kMaxRequestId));
        }
        return fail(name_,
                    "expected an object of strings, or a list of objects with key and value");
      case Place::map:
        return fail("descriptor." + shown(out_.descriptor.back().first), text);
      case Place::list:
        return fail(fmt::format("descriptor[{}]", out_.descriptor.size()),
                    "expected an object with key and value");
      case Place::entry:
        return fail(at_entry() + "." + name_,
                    name_ == "key"
                        ? fmt::format("expected a string of 1 to {} bytes", kMaxEntryText)
                        : text);
      default:
        return fail("", "expected a JSON object");
    }
  }

  // Makes room for one more entry.
  bool more() {
    if (out_.descriptor.size() >= kMaxEntries) {
      return fail("descriptor", fmt::format("expected at most {} entries", kMaxEntries));
    }
    out_.descriptor.emplace_back();
    return true;
  }

  std::string at_entry() const { return fmt::format("descriptor[{}]", out_.descriptor.size() - 1); }

  static std::string shown(const std::string& name) {
    return name.size() <= 64 ? name : name.substr(0, 64) + "…";
  }

  CheckBody& out_;
  BodyError& error_;
  const bool reserve_;
  Place place_ = Place::start;
  std::string name_;  // of the field being read
  bool seen_domain_ = false;
  bool seen_descriptor_ = false;
  bool seen_hits_ = false;
  bool seen_request_id_ = false;
  bool seen_over_admission_ = false;
  bool seen_timeout_ = false;
  bool seen_key_ = false;
  bool seen_value_ = false;
};

// The same for a settlement: one object of two members.
class SettleReader final : public nlohmann::json_sax<json> {
 public:
  SettleReader(SettleBody& out, BodyError& error) : out_(out), error_(error) {}

  bool finished() const { return depth_ == 2; }

  bool null() override { return wrong(); }
  bool boolean(bool) override { return wrong(); }
  bool number_integer(number_integer_t) override { return wrong(); }
  bool number_float(number_float_t, const string_t&) override { return wrong(); }
  bool binary(binary_t&) override { return wrong(); }
  bool start_array(std::size_t) override { return wrong(); }
  bool end_array() override { return wrong(); }

  bool number_unsigned(number_unsigned_t value) override {
    if (name_ != "hits" || value > kMaxHits) return wrong();
    out_.hits = value;
    return true;
  }
  bool string(string_t& value) override {
    if (name_ != "ticket" || value.empty() || value.size() > kMaxTicket) return wrong();
    out_.ticket = std::move(value);
    return true;
  }
  bool start_object(std::size_t) override { return ++depth_ == 1 || wrong(); }
  bool key(string_t& name) override {
    bool* seen = name == "ticket" ? &seen_ticket_ : name == "hits" ? &seen_hits_ : nullptr;
    if (seen == nullptr) {
      error_ = {name.substr(0, 64), "unknown field; expected ticket and hits"};
      return false;
    }
    name_ = name;
    if (std::exchange(*seen, true)) {
      error_ = {name_, "repeated field; expected it once"};
      return false;
    }
    return true;
  }
  bool end_object() override {
    if (!seen_ticket_ || !seen_hits_) {
      error_ = {seen_ticket_ ? "hits" : "ticket", "required field is missing"};
      return false;
    }
    ++depth_;
    return true;
  }
  bool parse_error(std::size_t position, const std::string&, const json::exception&) override {
    error_ = {"", fmt::format("expected JSON in UTF-8; it is broken at byte {}", position)};
    return false;
  }

 private:
  // A value that its place does not take.
  bool wrong() {
    if (name_ == "hits") {
      error_ = {name_, fmt::format("expected an integer from 0 to {}", kMaxHits)};
    } else if (name_ == "ticket") {
      error_ = {name_, fmt::format("expected a string of 1 to {} bytes", kMaxTicket)};
    } else {
      error_ = {"", "expected a JSON object"};
    }
    return false;
  }

  SettleBody& out_;
  BodyError& error_;
  int depth_ = 0;  // 2: the object has ended
  std::string name_;
  bool seen_ticket_ = false;
  bool seen_hits_ = false;
};

std::string dump(const Ordered& document) {
  return document.dump(-1, ' ', false, Ordered::error_handler_t::replace) + "\n";
}

Ordered milliseconds(Nanos length) {
  if (length == kNever) return nullptr;
  return milliseconds_rounded_up(length);
}

Ordered to_json(const HttpStatus& status) {
  Ordered out;
  out["rule"] = status.rule;
  out["allowed"] = status.allowed;
  out["limit"] = status.limit;
  out["remaining"] = status.remaining;
  out["reset_ms"] = milliseconds(status.reset);
  out["retry_after_ms"] = milliseconds(status.retry_after);
  out["delay_ms"] = milliseconds(status.delay);
  out["shadow"] = status.shadow;
  out["degraded"] = status.degraded;
  if (status.elsewhere) out["elsewhere"] = true;
  if (status.over_admission) out["over_admission_worst_case"] = *status.over_admission;
  return out;
}

}  // namespace

namespace {

bool parse_request(std::string_view body, CheckBody& out, BodyError& error, bool reserve) {
  out = {};
  error = {};
  CheckReader reader(out, error, reserve);
  const bool parsed = json::sax_parse(body.begin(), body.end(), &reader);
  if (parsed && reader.finished()) return true;
  if (error.expected.empty()) error.expected = "expected a JSON object";
  return false;
}

}  // namespace

bool parse_check(std::string_view body, CheckBody& out, BodyError& error) {
  return parse_request(body, out, error, false);
}

bool parse_reserve(std::string_view body, CheckBody& out, BodyError& error) {
  return parse_request(body, out, error, true);
}

bool parse_settle(std::string_view body, SettleBody& out, BodyError& error) {
  out = {};
  error = {};
  SettleReader reader(out, error);
  const bool parsed = json::sax_parse(body.begin(), body.end(), &reader);
  if (parsed && reader.finished()) return true;
  if (error.expected.empty()) error.expected = "expected a JSON object";
  return false;
}

std::string problem_json(unsigned status, std::string_view title, std::string_view detail,
                         std::string_view field) {
  Ordered out;
  out["type"] = "about:blank";
  out["title"] = title;
  out["status"] = status;
  out["detail"] = detail;
  if (!field.empty()) out["field"] = field;
  return dump(out);
}

std::string answer_json(const HttpAnswer& answer) {
  const HttpStatus* decider = answer.decider();
  Ordered out;
  if (!answer.allowed) {
    const bool degraded = decider != nullptr && decider->degraded;
    const std::string rule = decider == nullptr ? "" : decider->rule;
    out["type"] = degraded
                      ? "https://iana.org/assignments/http-problem-types#temporary-reduced-capacity"
                      : "https://iana.org/assignments/http-problem-types#quota-exceeded";
    out["title"] = degraded ? "Temporarily reduced capacity" : "Quota exceeded";
    out["status"] = 429;
    if (degraded) {
      out["detail"] = fmt::format("The limiter cannot count for rule {} now.", rule);
    } else if (decider != nullptr && decider->retry_after == kNever) {
      out["detail"] = fmt::format("Rule {} can never admit this request.", rule);
    } else if (decider != nullptr && decider->elsewhere) {
      out["detail"] =
          fmt::format("Rule {} has no rights left here; other regions are asked.", rule);
    } else {
      out["detail"] = fmt::format("Rule {} denied this request.", rule);
    }
    Ordered violated = Ordered::array();
    for (const HttpStatus& status : answer.statuses) {
      if (!status.allowed && !status.shadow) violated.push_back(status.rule);
    }
    out["violated-policies"] = std::move(violated);
  }
  out["allowed"] = answer.allowed;
  out["rule"] = decider == nullptr ? Ordered(nullptr) : Ordered(decider->rule);
  out["limit"] = decider == nullptr ? Ordered(nullptr) : Ordered(decider->limit);
  out["remaining"] = decider == nullptr ? Ordered(nullptr) : Ordered(decider->remaining);
  out["reset_ms"] = decider == nullptr ? Ordered(nullptr) : milliseconds(decider->reset);
  out["retry_after_ms"] =
      answer.allowed ? Ordered(0)
                     : (decider == nullptr ? Ordered(nullptr) : milliseconds(decider->retry_after));
  out["delay_ms"] = milliseconds(answer.delay());
  if (answer.repeated) out["repeated"] = true;
  if (answer.ticket) {
    out["ticket"] = answer.ticket->empty() ? Ordered(nullptr) : Ordered(*answer.ticket);
  }
  Ordered statuses = Ordered::array();
  for (const HttpStatus& status : answer.statuses) statuses.push_back(to_json(status));
  out["statuses"] = std::move(statuses);
  return dump(out);
}

std::string settled_json(const HttpSettled& settled) {
  Ordered out;
  out["settled"] = settled.known;
  out["reserved"] = settled.reserved;
  out["lapsed"] = settled.lapsed;
  out["degraded"] = settled.degraded;
  return dump(out);
}

}  // namespace weir::node
