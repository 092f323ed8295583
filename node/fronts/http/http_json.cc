#include <weir/node/fronts/http/http_json.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <new>
#include <utility>
#include <vector>

#include <fmt/format.h>
#include <simdjson.h>

#include <weir/limits/matching/text.h>
#include <weir/limits/text/utf8.h>
#include <weir/node/fronts/http/http_headers.h>
#include <weir/node/fronts/http/http_status.h>

namespace weir::node {
namespace {

namespace dom = simdjson::dom;
using internal::same_text;

// Memory that clear() keeps: more than any one body takes that is not made to take much.
constexpr std::size_t kKeptBytes = 4u << 20;
constexpr std::size_t kShownBytes = 64;

std::string shown(std::string_view name) {
  const std::string_view prefix = internal::utf8_prefix(name, kShownBytes);
  std::string out(prefix);
  if (prefix.size() < name.size()) out += "…";
  return out;
}

std::string string_of(std::size_t least, std::size_t most) {
  return least == 0 ? fmt::format("expected a string of at most {} bytes", most)
                    : fmt::format("expected a string of {} to {} bytes", least, most);
}

std::string integer_to(std::uint64_t most) {
  return fmt::format("expected an integer from 0 to {}", most);
}

constexpr std::string_view kRepeated = "repeated field; expected it once";
constexpr std::string_view kMissing = "required field is missing";
constexpr std::string_view kObject = "expected a JSON object";

std::string_view what_is_broken(simdjson::error_code code) {
  switch (code) {
    case simdjson::UTF8_ERROR:
      return "it is not UTF-8";
    case simdjson::EMPTY:
      return "it is empty";
    case simdjson::DEPTH_ERROR:
      return "it is nested too deeply";
    case simdjson::UNCLOSED_STRING:
      return "a string has no end";
    case simdjson::UNESCAPED_CHARS:
      return "a string has a control character in it";
    case simdjson::STRING_ERROR:
      return "a string has a wrong escape in it";
    case simdjson::NUMBER_ERROR:
      return "a number is broken or too large";
    case simdjson::T_ATOM_ERROR:
    case simdjson::F_ATOM_ERROR:
    case simdjson::N_ATOM_ERROR:
      return "a word is none of true, false and null";
    default:
      return "its braces, brackets, commas and colons do not fit";
  }
}

// The members of a body, as bits.
enum Member : unsigned {
  kDomain = 1,
  kDescriptor = 2,
  kDescriptors = 4,
  kHits = 8,
  kRequestId = 16,
  kOverAdmission = 32,
  kTimeout = 64,
  kKind = 128,
  kLimit = 256,
};

unsigned member_of(std::string_view name, bool reserve) {
  if (same_text(name, "domain")) return kDomain;
  if (same_text(name, "descriptor")) return kDescriptor;
  if (same_text(name, "hits")) return kHits;
  if (same_text(name, "request_id")) return kRequestId;
  if (same_text(name, "over_admission")) return kOverAdmission;
  if (!reserve && same_text(name, "kind")) return kKind;
  if (same_text(name, "limit")) return kLimit;
  if (same_text(name, reserve ? "timeout_ms" : "descriptors")) {
    return reserve ? kTimeout : kDescriptors;
  }
  return 0;
}

}  // namespace

// Bodies are parsed into the parser's own memory; what they say is copied into `text_` and
// described by offsets, which stay right while it grows. requests() makes views of them.
struct BodyReader::Impl {
  struct Text {
    std::size_t at = 0;
    std::size_t size = 0;
  };
  struct EntryText {
    Text key;
    Text value;
  };
  // A descriptor.
  struct Part {
    std::size_t entry = 0;  // its first one
    std::size_t entries = 0;
    std::uint64_t hits = 1;
  };
  struct Check {
    Text domain;
    Text id;
    std::size_t part = 0;  // its first one
    std::size_t parts = 0;
    bool over_admission = false;
    RequestKind kind = RequestKind::check;
    RequestLimit limit;
  };
  struct Mark {
    std::size_t text, entries, parts, checks;
  };

  dom::parser parser_;
  std::vector<char> padded_;  // the body, and room that the parser may look at
  std::string text_;
  std::vector<EntryText> entries_;
  std::vector<Part> parts_;
  std::vector<Check> checks_;
  std::vector<Entry> entry_views_;
  std::vector<Descriptor> descriptor_views_;
  std::vector<Request> requests_;
  Nanos timeout_ = kMinute;
  BodyError error_;
  // Where in a body the reader is: -1 is not in a list.
  int check_ = -1;
  int descriptor_ = -1;

  Mark mark() const { return {text_.size(), entries_.size(), parts_.size(), checks_.size()}; }
  void back_to(const Mark& mark) {
    text_.resize(mark.text);
    entries_.resize(mark.entries);
    parts_.resize(mark.parts);
    checks_.resize(mark.checks);
  }

  bool fail(std::string_view field, std::string_view expected);
  bool parse(std::string_view body, dom::element& out);
  template <typename Read>
  bool add(std::string_view body, Read&& read);
  bool read_check(dom::element body, bool reserve);
  bool read_member(Member member, std::string_view name, dom::element value);
  bool read_kind(dom::element value, std::string_view name, RequestKind& out);
  bool read_limit(dom::element value, RequestLimit& out);
  bool read_list(dom::element list);
  bool read_part(dom::element item);
  bool read_entries(dom::element value, std::string_view name);
  bool read_map(const dom::object& map, std::string_view name);
  bool read_entry(dom::element item, std::string_view name, std::size_t index);
  bool read_text(dom::element value, std::string_view field, std::size_t least, std::size_t most,
                 Text& out);
  bool read_integer(dom::element value, std::string_view field, std::uint64_t most,
                    std::uint64_t& out);
  bool read_checks(dom::element body);
  bool room_for_entry(std::string_view name);

  Text keep(std::string_view text) {
    const std::size_t at = text_.size();
    text_.append(text);
    return {at, text.size()};
  }
  std::string_view view(Text text) const { return {text_.data() + text.at, text.size}; }
  void make_views();
  // Of what requests() needs.
  std::size_t memory() const {
    return text_.capacity() + entries_.capacity() * (sizeof(EntryText) + sizeof(Entry)) +
           parts_.capacity() * (sizeof(Part) + sizeof(Descriptor)) +
           checks_.capacity() * (sizeof(Check) + sizeof(Request));
  }
};

bool BodyReader::Impl::fail(std::string_view field, std::string_view expected) {
  error_.field.clear();
  if (check_ >= 0) fmt::format_to(std::back_inserter(error_.field), "checks[{}].", check_);
  if (descriptor_ >= 0) {
    fmt::format_to(std::back_inserter(error_.field), "descriptors[{}].", descriptor_);
  }
  error_.field.append(field);
  if (field.empty() && !error_.field.empty()) error_.field.pop_back();
  error_.expected = expected;
  return false;
}

bool BodyReader::Impl::parse(std::string_view body, dom::element& out) {
  const std::size_t needed = body.size() + simdjson::SIMDJSON_PADDING;
  if (padded_.size() < needed) {
    padded_.resize(std::bit_ceil(needed));
    // At once for all bodies that fit: the parser's memory would grow byte by byte.
    const auto failed = parser_.allocate(padded_.size());
    if (failed != simdjson::SUCCESS || parser_.doc.allocate(padded_.size()) != simdjson::SUCCESS) {
      padded_.clear();
      throw std::bad_alloc();
    }
  }
  if (!body.empty()) std::memcpy(padded_.data(), body.data(), body.size());
  std::memset(padded_.data() + body.size(), 0, simdjson::SIMDJSON_PADDING);
  const auto code = parser_.parse(padded_.data(), body.size(), false).get(out);
  if (code == simdjson::SUCCESS) {
    // Whatever the parser takes it for: what stands behind it must have been read.
    if (body.find('\0') == body.npos) return true;
    return fail("", "expected JSON in UTF-8: a NUL is in it");
  }
  if (code == simdjson::MEMALLOC) throw std::bad_alloc();
  return fail("", fmt::format("expected JSON in UTF-8: {}", what_is_broken(code)));
}

// Adds what `read` reads, or nothing.
template <typename Read>
bool BodyReader::Impl::add(std::string_view body, Read&& read) {
  check_ = descriptor_ = -1;
  const Mark before = mark();
  dom::element document;
  if (parse(body, document) && read(document)) return true;
  back_to(before);
  return false;
}

bool BodyReader::Impl::read_checks(dom::element body) {
  dom::object members;
  if (body.get(members) != simdjson::SUCCESS) return fail("", kObject);
  bool seen = false;
  for (const dom::key_value_pair member : members) {
    if (member.key != "checks") return fail(shown(member.key), "unknown field; expected checks");
    if (std::exchange(seen, true)) return fail("checks", kRepeated);
    dom::array list;
    if (member.value.get(list) != simdjson::SUCCESS) {
      return fail("checks", fmt::format("expected a list of 1 to {} checks", kMaxChecks));
    }
    for (const dom::element item : list) {
      if (static_cast<std::size_t>(++check_) >= kMaxChecks) break;
      if (!read_check(item, false)) return false;
    }
    const int last = std::exchange(check_, -1);
    if (last < 0 || static_cast<std::size_t>(last) >= kMaxChecks) {
      return fail("checks", fmt::format("expected a list of 1 to {} checks", kMaxChecks));
    }
  }
  return seen || fail("checks", kMissing);
}

bool BodyReader::Impl::read_check(dom::element body, bool reserve) {
  dom::object members;
  if (body.get(members) != simdjson::SUCCESS) return fail("", kObject);
  checks_.emplace_back().part = parts_.size();
  parts_.emplace_back().entry = entries_.size();
  unsigned seen = 0;
  for (const dom::key_value_pair member : members) {
    const unsigned which = member_of(member.key, reserve);
    if (which == 0) {
      return fail(shown(member.key),
                  reserve ? "unknown field; expected domain, descriptor, hits, request_id, "
                            "over_admission, limit or timeout_ms"
                          : "unknown field; expected domain, descriptor or descriptors, hits, "
                            "request_id, over_admission, kind or limit");
    }
    if ((seen & which) != 0) return fail(member.key, kRepeated);
    seen |= which;
    if (!read_member(static_cast<Member>(which), member.key, member.value)) return false;
  }
  if ((seen & kDomain) == 0) return fail("domain", kMissing);
  if ((seen & kDescriptors) != 0) {
    if ((seen & kDescriptor) != 0) {
      return fail("descriptors", "expected either descriptor or descriptors, not both");
    }
    if ((seen & kHits) != 0) {
      return fail("hits", "beside descriptors each of them has its own; expected none here");
    }
  }
  Check& check = checks_.back();
  check.parts = parts_.size() - check.part;
  return true;
}

bool BodyReader::Impl::read_member(Member member, std::string_view name, dom::element value) {
  Check& check = checks_.back();
  switch (member) {
    case kDomain:
      return read_text(value, name, 1, rpc::kMaxText, check.domain);
    case kDescriptor:
      return read_entries(value, name);
    case kDescriptors:
      return read_list(value);
    case kHits:
      return read_integer(value, name, kMaxHits, parts_[check.part].hits);
    case kRequestId:
      return read_text(value, name, 1, rpc::kMaxRequestId, check.id);
    case kOverAdmission:
      return value.get(check.over_admission) == simdjson::SUCCESS ||
             fail(name, "expected true or false");
    case kKind:
      return read_kind(value, name, check.kind);
    case kLimit:
      return read_limit(value, check.limit);
    case kTimeout: {
      std::uint64_t length = 0;
      if (!read_integer(value, name, kMaxTimeoutMs, length)) return false;
      timeout_ = static_cast<Nanos>(length) * kMillisecond;
      return true;
    }
  }
  return false;
}

bool BodyReader::Impl::read_kind(dom::element value, std::string_view name, RequestKind& out) {
  constexpr std::pair<std::string_view, RequestKind> kKinds[] = {{"check", RequestKind::check},
                                                                 {"report", RequestKind::report},
                                                                 {"refund", RequestKind::refund}};
  std::string_view text;
  if (value.get(text) == simdjson::SUCCESS) {
    for (const auto& [word, kind] : kKinds) {
      if (text != word) continue;
      out = kind;
      return true;
    }
  }
  return fail(name, "expected \"check\", \"report\" or \"refund\"");
}

bool BodyReader::Impl::read_limit(dom::element value, RequestLimit& out) {
  dom::object members;
  if (value.get(members) != simdjson::SUCCESS) {
    return fail("limit", "expected an object with limit, window_ms and burst");
  }
  unsigned seen = 0;
  for (const dom::key_value_pair member : members) {
    const bool limit = member.key == "limit";
    const bool window = member.key == "window_ms";
    const std::string field = fmt::format("limit.{}", shown(member.key));
    if (!limit && !window && member.key != "burst") {
      return fail(field, "unknown field; expected limit, window_ms and burst");
    }
    const unsigned which = limit ? 1 : window ? 2 : 4;
    if ((seen & which) != 0) return fail(field, kRepeated);
    seen |= which;
    std::uint64_t number = 0;
    if (!read_integer(member.value, field, window ? kMaxWindowMs : kMaxHits, number)) return false;
    if (number == 0) return fail(field, "expected an integer of at least 1");
    if (window) {
      out.window = static_cast<Nanos>(number) * kMillisecond;
    } else {
      (limit ? out.limit : out.burst) = number;
    }
  }
  return true;
}

// Descriptors. The check has one already, which becomes the first.
bool BodyReader::Impl::read_list(dom::element value) {
  dom::array list;
  const bool is_list = value.get(list) == simdjson::SUCCESS;
  bool good = is_list && list.begin() != list.end();
  if (good) {
    for (const dom::element item : list) {
      if (static_cast<std::size_t>(++descriptor_) >= kMaxDescriptors) break;
      if (descriptor_ > 0) parts_.emplace_back().entry = entries_.size();
      if (!read_part(item)) return false;
    }
    good = static_cast<std::size_t>(std::exchange(descriptor_, -1)) < kMaxDescriptors;
  }
  return good || fail("descriptors",
                      fmt::format("expected a list of 1 to {} descriptors", kMaxDescriptors));
}

bool BodyReader::Impl::read_part(dom::element item) {
  dom::object members;
  if (item.get(members) != simdjson::SUCCESS) {
    return fail("", "expected an object with entries and hits");
  }
  bool seen_entries = false;
  bool seen_hits = false;
  for (const dom::key_value_pair member : members) {
    const bool entries = member.key == "entries";
    if (!entries && member.key != "hits") {
      return fail(shown(member.key), "unknown field; expected entries and hits");
    }
    if (std::exchange(entries ? seen_entries : seen_hits, true)) return fail(member.key, kRepeated);
    if (!(entries ? read_entries(member.value, member.key)
                  : read_integer(member.value, member.key, kMaxHits, parts_.back().hits))) {
      return false;
    }
  }
  return seen_entries || fail("entries", kMissing);
}

bool BodyReader::Impl::read_entries(dom::element value, std::string_view name) {
  dom::object map;
  if (value.get(map) == simdjson::SUCCESS) return read_map(map, name);
  dom::array list;
  if (value.get(list) != simdjson::SUCCESS) {
    return fail(name, "expected an object of strings, or a list of objects with key and value");
  }
  std::size_t index = 0;
  for (const dom::element item : list) {
    if (!read_entry(item, name, index++)) return false;
  }
  return true;
}

// A message is made only where it is wanted.
bool BodyReader::Impl::room_for_entry(std::string_view name) {
  return parts_.back().entries++ < rpc::kMaxEntries ||
         fail(name, fmt::format("expected at most {} entries", rpc::kMaxEntries));
}

bool BodyReader::Impl::read_map(const dom::object& map, std::string_view name) {
  const auto first = static_cast<std::ptrdiff_t>(entries_.size());
  for (const dom::key_value_pair member : map) {
    if (member.key.empty() || member.key.size() > rpc::kMaxText) {
      return fail(name, fmt::format("expected keys of 1 to {} bytes", rpc::kMaxText));
    }
    if (std::any_of(entries_.begin() + first, entries_.end(), [&](const EntryText& entry) {
          return same_text(view(entry.key), member.key);
        })) {
      return fail(fmt::format("{}.{}", name, shown(member.key)), kRepeated);
    }
    if (!room_for_entry(name)) return false;
    std::string_view text;
    if (member.value.get(text) != simdjson::SUCCESS || text.size() > rpc::kMaxText) {
      return fail(fmt::format("{}.{}", name, shown(member.key)), string_of(0, rpc::kMaxText));
    }
    const Text key = keep(member.key);
    entries_.push_back({key, keep(text)});
  }
  return true;
}

bool BodyReader::Impl::read_entry(dom::element item, std::string_view name, std::size_t index) {
  dom::object members;
  if (item.get(members) != simdjson::SUCCESS) {
    return fail(fmt::format("{}[{}]", name, index), "expected an object with key and value");
  }
  if (!room_for_entry(name)) return false;
  EntryText entry;
  bool seen_key = false;
  bool seen_value = false;
  for (const dom::key_value_pair member : members) {
    const bool key = member.key == "key";
    const auto field = [&] { return fmt::format("{}[{}].{}", name, index, shown(member.key)); };
    if (!key && member.key != "value") {
      return fail(field(), "unknown field; expected key and value");
    }
    if (std::exchange(key ? seen_key : seen_value, true)) return fail(field(), kRepeated);
    std::string_view text;
    const std::size_t least = key ? 1 : 0;
    if (member.value.get(text) != simdjson::SUCCESS || text.size() < least ||
        text.size() > rpc::kMaxText) {
      return fail(field(), string_of(least, rpc::kMaxText));
    }
    (key ? entry.key : entry.value) = keep(text);
  }
  if (!seen_key || !seen_value) {
    return fail(fmt::format("{}[{}]", name, index), "expected both key and value");
  }
  entries_.push_back(entry);
  return true;
}

bool BodyReader::Impl::read_text(dom::element value, std::string_view field, std::size_t least,
                                 std::size_t most, Text& out) {
  std::string_view text;
  if (value.get(text) != simdjson::SUCCESS || text.size() < least || text.size() > most) {
    return fail(field, string_of(least, most));
  }
  out = keep(text);
  return true;
}

bool BodyReader::Impl::read_integer(dom::element value, std::string_view field, std::uint64_t most,
                                    std::uint64_t& out) {
  std::uint64_t number = 0;
  // Asked for its type first: a number with a fraction would be converted.
  if ((!value.is_uint64() && !value.is_int64()) || value.get(number) != simdjson::SUCCESS ||
      number > most) {
    return fail(field, integer_to(most));
  }
  out = number;
  return true;
}

void BodyReader::Impl::make_views() {
  // Sized at once: spans into them are made while they fill.
  entry_views_.resize(entries_.size());
  for (std::size_t i = 0; i < entries_.size(); ++i) {
    entry_views_[i] = {view(entries_[i].key), view(entries_[i].value)};
  }
  descriptor_views_.resize(parts_.size());
  for (std::size_t i = 0; i < parts_.size(); ++i) {
    const Part& part = parts_[i];
    descriptor_views_[i] = {{entry_views_.data() + part.entry, part.entries}, part.hits};
  }
  requests_.resize(checks_.size());
  for (std::size_t i = 0; i < checks_.size(); ++i) {
    const Check& check = checks_[i];
    const Descriptor* first = descriptor_views_.data() + check.part;
    Request& request = requests_[i];
    request.domain = view(check.domain);
    request.descriptor = first->entries;
    request.hits = first->hits;
    request.id = view(check.id);
    request.wants_bound = check.over_admission;
    request.kind = check.kind;
    request.limit = check.limit;
    request.more = {first + 1, check.parts - 1};
  }
}

BodyReader::BodyReader() : impl_(std::make_unique<Impl>()) {}
BodyReader::~BodyReader() = default;
BodyReader::BodyReader(BodyReader&&) noexcept = default;
BodyReader& BodyReader::operator=(BodyReader&&) noexcept = default;

bool BodyReader::check(std::string_view body) {
  return impl_->add(body, [&](dom::element root) { return impl_->read_check(root, false); });
}

bool BodyReader::checks(std::string_view body) {
  return impl_->add(body, [&](dom::element root) { return impl_->read_checks(root); });
}

bool BodyReader::reserve(std::string_view body) {
  impl_->timeout_ = kMinute;
  return impl_->add(body, [&](dom::element root) { return impl_->read_check(root, true); });
}

bool BodyReader::settle(std::string_view body, SettleBody& out) {
  Impl& self = *impl_;
  self.check_ = self.descriptor_ = -1;
  dom::element root;
  dom::object members;
  if (!self.parse(body, root)) return false;
  if (root.get(members) != simdjson::SUCCESS) return self.fail("", kObject);
  bool seen_ticket = false;
  bool seen_hits = false;
  for (const dom::key_value_pair member : members) {
    const bool ticket = member.key == "ticket";
    if (!ticket && member.key != "hits") {
      return self.fail(shown(member.key), "unknown field; expected ticket and hits");
    }
    if (std::exchange(ticket ? seen_ticket : seen_hits, true)) {
      return self.fail(member.key, kRepeated);
    }
    if (!ticket) {
      if (!self.read_integer(member.value, "hits", kMaxHits, out.hits)) return false;
    } else if (member.value.get(out.ticket) != simdjson::SUCCESS || out.ticket.empty() ||
               out.ticket.size() > rpc::kMaxTicket) {
      return self.fail("ticket", string_of(1, rpc::kMaxTicket));
    }
  }
  if (!seen_ticket) return self.fail("ticket", kMissing);
  return seen_hits || self.fail("hits", kMissing);
}

std::size_t BodyReader::size() const {
  return impl_->checks_.size();
}

std::span<const Request> BodyReader::requests() {
  impl_->make_views();
  return impl_->requests_;
}

Nanos BodyReader::timeout() const {
  return impl_->timeout_;
}

const BodyError& BodyReader::error() const {
  return impl_->error_;
}

void BodyReader::clear() {
  if (impl_->memory() > kKeptBytes) *impl_ = Impl();
  impl_->back_to({});
}

namespace {

// Bytes that a JSON string takes as they are: printable ASCII without '"' and '\'.
constexpr auto kPlain = [] {
  std::array<bool, 256> plain{};
  for (unsigned c = ' '; c < 0x7f; ++c) plain[c] = c != '"' && c != '\\';
  return plain;
}();

std::size_t plain_prefix(std::string_view text) {
  std::size_t i = 0;
  while (i < text.size() && kPlain[static_cast<unsigned char>(text[i])]) ++i;
  return i;
}

void append_escape(rpc::Output& out, unsigned char c) {
  constexpr std::string_view kDigits = "0123456789abcdef";
  constexpr std::string_view kShort = "\b\f\n\r\t\"\\";
  constexpr std::string_view kLetters = "bfnrt\"\\";
  out.push_back('\\');
  if (const std::size_t at = kShort.find(static_cast<char>(c)); at != kShort.npos) {
    out.push_back(kLetters[at]);
    return;
  }
  out.append("u00");
  out.push_back(kDigits[c >> 4]);
  out.push_back(kDigits[c & 15u]);
}

// Within quotes.
void append_escaped(rpc::Output& out, std::string_view text) {
  while (true) {
    const std::size_t plain = plain_prefix(text);
    out.append(text.substr(0, plain));
    text.remove_prefix(plain);
    if (text.empty()) return;
    const auto c = static_cast<unsigned char>(text.front());
    std::size_t length = 1;
    if (c < ' ' || c == '"' || c == '\\') {
      append_escape(out, c);
    } else if (const std::size_t sequence = internal::utf8_length(text); sequence != 0) {
      length = sequence;
      out.append(text.substr(0, length));
    } else {
      out.append("\xEF\xBF\xBD");
    }
    text.remove_prefix(length);
  }
}

void append_bool(rpc::Output& out, bool value) {
  out.append(value ? std::string_view("true") : std::string_view("false"));
}

void append_milliseconds(rpc::Output& out, Nanos length) {
  if (length == kNever) return out.append("null");
  out.append_decimal(milliseconds_rounded_up(length));
}

void append_status(rpc::Output& out, const Status& status, bool several) {
  out.append("{\"rule\":\"");
  append_escaped(out, status.rule);
  out.append(status.allowed ? std::string_view("\",\"allowed\":true,\"limit\":")
                            : std::string_view("\",\"allowed\":false,\"limit\":"));
  out.append_decimal(status.limit);
  out.append(",\"remaining\":");
  out.append_decimal(status.remaining);
  out.append(",\"reset_ms\":");
  append_milliseconds(out, status.reset);
  out.append(",\"retry_after_ms\":");
  append_milliseconds(out, status.retry_after);
  out.append(",\"delay_ms\":");
  append_milliseconds(out, status.delay);
  out.append(status.shadow ? std::string_view(",\"shadow\":true,\"degraded\":")
                           : std::string_view(",\"shadow\":false,\"degraded\":"));
  append_bool(out, status.degraded);
  if (status.exhausted_locally) out.append(",\"exhausted_locally\":true");
  if (status.over_admission) {
    out.append(",\"over_admission_worst_case\":");
    out.append_decimal(*status.over_admission);
  }
  if (several) {
    out.append(",\"descriptor\":");
    out.append_decimal(status.descriptor);
  }
  out.push_back('}');
}

// What makes a problem document of a denial.
void append_denial(rpc::Output& out, const Reply& reply, const Status* decider) {
  const bool degraded = decider != nullptr && decider->degraded;
  out.append("\"type\":\"https://iana.org/assignments/http-problem-types#");
  out.append(degraded ? std::string_view(
                            "temporary-reduced-capacity\",\"title\":\"Temporarily reduced capacity")
                      : std::string_view("quota-exceeded\",\"title\":\"Quota exceeded"));
  out.append("\",\"status\":");
  out.append_decimal(http_status(reply));
  const bool own = decider != nullptr && !decider->deny_message.empty();
  out.append(own        ? std::string_view(",\"detail\":\"")
             : degraded ? std::string_view(",\"detail\":\"The limiter cannot count for rule ")
                        : std::string_view(",\"detail\":\"Rule "));
  if (decider != nullptr) append_escaped(out, own ? decider->deny_message : decider->rule);
  if (own) {
    // That is all.
  } else if (degraded) {
    out.append(" now.");
  } else if (decider != nullptr && decider->retry_after == kNever) {
    out.append(" can never admit this request.");
  } else if (decider != nullptr && decider->exhausted_locally) {
    out.append(" has no rights left here; other regions are asked.");
  } else {
    out.append(" denied this request.");
  }
  out.append("\",\"violated-policies\":[");
  bool first = true;
  for (std::size_t i = 0; i < reply.statuses.size(); ++i) {
    const Status& status = reply.statuses[i];
    if (status.allowed || status.shadow) continue;
    // Several descriptors may break one rule.
    if (status.descriptor > 0 &&
        std::any_of(reply.statuses.begin(), reply.statuses.begin() + static_cast<std::ptrdiff_t>(i),
                    [&](const Status& other) {
                      return !other.allowed && same_text(other.rule, status.rule);
                    })) {
      continue;
    }
    if (!std::exchange(first, false)) out.push_back(',');
    append_json_string(out, status.rule);
  }
  out.append("],");
}

// A decision as a JSON object, without its end.
void append_decision(rpc::Output& out, const Reply& reply) {
  const Status* decider = reply.decider();
  out.push_back('{');
  if (!reply.allowed) append_denial(out, reply, decider);
  out.append("\"allowed\":");
  append_bool(out, reply.allowed);
  if (decider == nullptr) {
    out.append(",\"rule\":null,\"limit\":null,\"remaining\":null,\"reset_ms\":null");
  } else {
    out.append(",\"rule\":\"");
    append_escaped(out, decider->rule);
    out.append("\",\"limit\":");
    out.append_decimal(decider->limit);
    out.append(",\"remaining\":");
    out.append_decimal(decider->remaining);
    out.append(",\"reset_ms\":");
    append_milliseconds(out, decider->reset);
  }
  out.append(",\"retry_after_ms\":");
  append_milliseconds(out, reply.allowed ? 0 : decider == nullptr ? kNever : decider->retry_after);
  out.append(",\"delay_ms\":");
  append_milliseconds(out, reply.delay());
  if (reply.repeated) out.append(",\"repeated\":true");
  if (reply.given_back > 0) {
    out.append(",\"given_back\":");
    out.append_decimal(reply.given_back);
  }
}

void append_statuses(rpc::Output& out, const Reply& reply) {
  const bool several = std::any_of(reply.statuses.begin(), reply.statuses.end(),
                                   [](const Status& status) { return status.descriptor != 0; });
  out.append(",\"statuses\":[");
  for (std::size_t i = 0; i < reply.statuses.size(); ++i) {
    if (i > 0) out.push_back(',');
    append_status(out, reply.statuses[i], several);
  }
  out.append("]}");
}

void append_error(rpc::Output& out, const Error& error) {
  const unsigned status = http_status(error.kind);
  append_problem(out, status, http_reason(status), error.detail, {}, error.kind);
}

}  // namespace

unsigned http_status(ErrorKind kind) {
  switch (kind) {
    case ErrorKind::none:
      return 200;
    case ErrorKind::invalid:
      return 400;
    case ErrorKind::unauthenticated:
      return 401;
    case ErrorKind::forbidden:
      return 403;
    case ErrorKind::unsupported:
      return 501;
    default:
      return 503;
  }
}

unsigned http_status(const Reply& reply) {
  if (!reply.error.empty()) return http_status(reply.error.kind);
  if (reply.allowed) return 200;
  const Status* decider = reply.decider();
  return decider == nullptr ? kDenyStatus : decider->deny_status;
}

unsigned http_status(const SettleReply& reply) {
  if (!reply.error.empty()) return http_status(reply.error.kind);
  return reply.settled ? 200 : 404;
}

std::string_view content_type(unsigned status) {
  return status < 400 ? std::string_view("application/json")
                      : std::string_view("application/problem+json");
}

void append_json_string(rpc::Output& out, std::string_view text) {
  out.push_back('"');
  append_escaped(out, text);
  out.push_back('"');
}

void append_answer(rpc::Output& out, const Reply& reply) {
  if (!reply.error.empty()) return append_error(out, reply.error);
  append_decision(out, reply);
  append_statuses(out, reply);
  out.push_back('\n');
}

void append_answers(rpc::Output& out, std::span<const Reply> replies) {
  out.append("{\"results\":[");
  for (std::size_t i = 0; i < replies.size(); ++i) {
    const Reply& reply = replies[i];
    if (i > 0) out.push_back(',');
    if (reply.error.empty()) {
      append_decision(out, reply);
      append_statuses(out, reply);
      continue;
    }
    out.append("{\"error\":\"");
    out.append(to_string(reply.error.kind));
    out.append("\",\"detail\":");
    append_json_string(out, reply.error.detail);
    out.push_back('}');
  }
  out.append("]}\n");
}

void append_reserved(rpc::Output& out, const ReserveReply& reply) {
  if (!reply.decision.error.empty()) return append_error(out, reply.decision.error);
  append_decision(out, reply.decision);
  out.append(",\"ticket\":");
  if (reply.ticket.empty()) {
    out.append("null");
  } else {
    append_json_string(out, reply.ticket);
  }
  append_statuses(out, reply.decision);
  out.push_back('\n');
}

void append_settled(rpc::Output& out, const SettleReply& reply) {
  if (!reply.error.empty()) return append_error(out, reply.error);
  if (!reply.settled) {
    return append_problem(
        out, 404, "Unknown ticket",
        "No such ticket is open here: it was settled, has timed out, or is another node's.",
        "ticket");
  }
  out.append("{\"settled\":true,\"reserved\":");
  out.append_decimal(reply.reserved);
  out.append(",\"lapsed\":");
  append_bool(out, reply.lapsed);
  out.append(",\"degraded\":");
  append_bool(out, reply.degraded);
  out.append("}\n");
}

void append_problem(rpc::Output& out, unsigned status, std::string_view title,
                    std::string_view detail, std::string_view field, ErrorKind error) {
  out.append("{\"type\":\"about:blank\",\"title\":");
  append_json_string(out, title);
  out.append(",\"status\":");
  out.append_decimal(status);
  out.append(",\"detail\":");
  append_json_string(out, detail);
  if (!field.empty()) {
    out.append(",\"field\":");
    append_json_string(out, field);
  }
  if (error != ErrorKind::none) {
    out.append(",\"error\":");
    append_json_string(out, to_string(error));
  }
  out.append("}\n");
}

void append_problem(rpc::Output& out, const BodyError& error) {
  if (error.field.empty()) {
    return append_problem(out, 400, http_reason(400), error.expected, {}, ErrorKind::invalid);
  }
  append_problem(out, 400, http_reason(400), error.field + ": " + error.expected, error.field,
                 ErrorKind::invalid);
}

}  // namespace weir::node
