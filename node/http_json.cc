#include <weir/node/http_json.h>

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
  CheckReader(CheckBody& out, BodyError& error) : out_(out), error_(error) {}

  bool finished() const { return place_ == Place::end; }

  bool null() override { return wrong(); }
  bool boolean(bool) override { return wrong(); }
  bool number_integer(number_integer_t) override { return wrong(); }
  bool number_float(number_float_t, const string_t&) override { return wrong(); }
  bool binary(binary_t&) override { return wrong(); }

  bool number_unsigned(number_unsigned_t value) override {
    if (place_ != Place::body || name_ != "hits" || value > kMaxHits) return wrong();
    out_.hits = value;
    return true;
  }

  bool string(string_t& value) override {
    if (place_ == Place::body && name_ == "domain") {
      if (value.empty() || value.size() > kMaxDomainText) return wrong();
      out_.domain = std::move(value);
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
        bool* seen = name == "domain"       ? &seen_domain_
                     : name == "descriptor" ? &seen_descriptor_
                     : name == "hits"       ? &seen_hits_
                                            : nullptr;
        if (seen == nullptr) {
          return fail(shown(name), "unknown field; expected domain, descriptor or hits");
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
  Place place_ = Place::start;
  std::string name_;  // of the field being read
  bool seen_domain_ = false;
  bool seen_descriptor_ = false;
  bool seen_hits_ = false;
  bool seen_key_ = false;
  bool seen_value_ = false;
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
  return out;
}

}  // namespace

bool parse_check(std::string_view body, CheckBody& out, BodyError& error) {
  out = {};
  error = {};
  CheckReader reader(out, error);
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
  Ordered statuses = Ordered::array();
  for (const HttpStatus& status : answer.statuses) statuses.push_back(to_json(status));
  out["statuses"] = std::move(statuses);
  return dump(out);
}

}  // namespace weir::node
