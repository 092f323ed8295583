#include <weir/limits/yaml/reader.h>

#include <fmt/format.h>

#include <algorithm>
#include <map>

#include <weir/limits/text/duration.h>
#include <weir/limits/text/number.h>
#include <weir/limits/text/size.h>
#include <weir/limits/text/utf8.h>

namespace weir::yaml {
namespace {

using internal::field_path;

/// What may be read in all, in bytes of scalars plus one for each node. A file without aliases
/// stays below this, because of its size; aliases could multiply it without end.
constexpr std::size_t kMaxExpanded = 2 * kMaxText;

/// Insertions, deletions, replacements and swaps of neighbours that turn a into b.
std::size_t distance(std::string_view a, std::string_view b) {
  std::vector<std::size_t> before(b.size() + 1);
  std::vector<std::size_t> last(b.size() + 1);
  std::vector<std::size_t> row(b.size() + 1);
  for (std::size_t j = 0; j <= b.size(); ++j) last[j] = j;
  for (std::size_t i = 1; i <= a.size(); ++i) {
    row[0] = i;
    for (std::size_t j = 1; j <= b.size(); ++j) {
      const std::size_t replaced = last[j - 1] + (a[i - 1] == b[j - 1] ? 0 : 1);
      row[j] = std::min({replaced, last[j] + 1, row[j - 1] + 1});
      if (i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1]) {
        row[j] = std::min(row[j], before[j - 2] + 1);
      }
    }
    std::swap(before, last);
    std::swap(last, row);
  }
  return last[b.size()];
}

}  // namespace

// --- Problems ---

void Reader::fail(Position at, std::string_view path, std::string text) {
  if (!full()) problems_.push_back({at, std::string(path), std::move(text)});
}

bool Reader::fail(const Value& value, std::string text) {
  fail(at(value), value.path, std::move(text));
  return false;
}

bool Reader::expected(const Value& value, std::string_view what) {
  return fail(value, wording_.expected(what, node(value)));
}

/// Whatever is read was entered once on the way to it.
const Node& Reader::enter(std::uint32_t index) {
  const Node& node = tree_.nodes[index];
  expanded_ += 1 + node.text.size();
  if (expanded_ > kMaxExpanded && !stopped_) {
    fail(node.at, "",
         wording_.expected(
             fmt::format("at most {} MiB when aliases are expanded", kMaxExpanded >> 20)));
    stopped_ = true;
  }
  return node;
}

const std::string* Reader::scalar(const Value& value) const {
  return is(value, Node::Kind::scalar) ? &node(value).text : nullptr;
}

// --- Maps and lists ---

bool Reader::entries(const Value& map, std::string_view kind, std::vector<Member>& out) {
  if (!is_map(map)) return expected(map, wording_.a_map({}));
  std::map<std::string_view, std::uint32_t> first;
  const std::vector<std::uint32_t>& children = node(map).children;
  for (std::size_t i = 0; i + 1 < children.size() && !full(); i += 2) {
    const Node& key = enter(children[i]);
    if (key.kind != Node::Kind::scalar || key.tagged) {
      fail(key.at, map.path, wording_.expected(wording_.a_key(), key));
      continue;
    }
    std::string path = field_path(map.path, key.text);
    const auto [other, fresh] = first.try_emplace(key.text, children[i]);
    if (!fresh) {
      fail(key.at, path, wording_.repeated(kind, tree_.nodes[other->second].at));
      continue;
    }
    enter(children[i + 1]);
    out.push_back({key.text, {children[i], path}, {children[i + 1], path}});
  }
  return true;
}

Reader::Fields Reader::mapping(const Value& value, std::span<const Field> known) {
  std::vector<std::string_view> names;
  for (const Field& field : known) names.push_back(field.name);
  Fields out;
  if (!is_map(value)) {
    expected(value, wording_.a_map(names));
    return out;
  }
  out.is_map = true;
  std::vector<Member> found;
  entries(value, "field", found);
  std::vector<bool> seen(names.size());
  for (const Member& entry : found) {
    if (full()) return out;
    const auto at = std::find(names.begin(), names.end(), entry.name);
    if (at == names.end()) {
      fail(entry.key, wording_.unknown_field(entry.name, names));
      continue;
    }
    const auto which = static_cast<std::size_t>(at - names.begin());
    seen[which] = true;
    const bool nothing = node(entry.value).kind == Node::Kind::null;
    const bool good = nothing && !wording_.no_value().empty()
                          // YAML puts what is not there at the next token, which may be lines away.
                          ? fail(entry.key, std::string(wording_.no_value()))
                          : known[which].read(entry.value);
    if (!good) out.bad.push_back(known[which].name);
  }
  for (std::size_t i = 0; i < names.size(); ++i) {
    const std::string_view required = known[i].required;
    if (seen[i] || required.empty()) continue;
    fail(at(value), field_path(value.path, names[i]), wording_.missing(required));
    out.bad.push_back(known[i].name);
  }
  return out;
}

bool Reader::items(const Value& list, std::string_view what, std::vector<Value>& out) {
  if (!is_list(list)) return expected(list, what);
  const std::vector<std::uint32_t>& children = node(list).children;
  for (std::size_t i = 0; i < children.size() && !full(); ++i) {
    enter(children[i]);
    out.push_back({children[i], fmt::format("{}[{}]", list.path, i)});
  }
  return true;
}

// --- Scalars ---

bool Reader::text(const Value& value, std::string_view what, std::string& out) {
  const std::string* text = scalar(value);
  if (text == nullptr) return expected(value, what);
  out = *text;
  return true;
}

bool Reader::text(const Value& value, std::string_view what, std::size_t most, std::string& out) {
  const std::string* text = scalar(value);
  if (text == nullptr || text->empty() || text->size() > most ||
      text->find('\0') != std::string::npos) {
    return expected(value, fmt::format("{} of 1 to {} bytes", what, most));
  }
  out = *text;
  return true;
}

bool Reader::integer(const Value& value, std::uint64_t low, std::uint64_t high,
                     std::uint64_t& out) {
  const std::string* text = scalar(value);
  std::uint64_t number = 0;
  const bool plain = text != nullptr && node(value).plain;
  const Digits digits = plain ? parse_number(*text, number) : Digits::none;
  if (digits != Digits::good || number < low || number > high) {
    return expected(value, wording_.an_integer(digits == Digits::none, low, high));
  }
  out = number;
  return true;
}

bool Reader::duration(const Value& value, std::string_view what, Nanos low, Nanos high,
                      Nanos& out) {
  const std::string* text = scalar(value);
  Nanos length = 0;
  if (text == nullptr || !parse_duration(*text, length) || length < low || length > high) {
    return expected(value, what);
  }
  out = length;
  return true;
}

bool Reader::size(const Value& value, std::uint64_t low, std::uint64_t high, std::uint64_t multiple,
                  std::uint64_t& out) {
  const std::string* text = scalar(value);
  std::uint64_t bytes = 0;
  if (text == nullptr || !parse_size(*text, bytes) || bytes < low || bytes > high ||
      bytes % multiple != 0) {
    std::string what = fmt::format("a size from {} to {}", format_size(low), format_size(high));
    if (multiple > 1) what += fmt::format(", a multiple of {}", format_size(multiple));
    return expected(value, what);
  }
  out = bytes;
  return true;
}

std::size_t Reader::choose(const Value& value, Words words) {
  const std::string* text = scalar(value);
  const auto found = text == nullptr ? words.end() : std::find(words.begin(), words.end(), *text);
  if (found == words.end()) fail(value, wording_.not_one_of(words, node(value)));
  return static_cast<std::size_t>(found - words.begin());
}

// --- Words ---

std::string listed(Words words) {
  std::string out;
  for (std::size_t i = 0; i < words.size(); ++i) {
    if (i > 0) out += i + 1 == words.size() ? " or " : ", ";
    out += words[i];
  }
  return out;
}

std::string did_you_mean(std::string_view text, Words words) {
  constexpr std::size_t kLongest = 32;
  if (text.size() > kLongest) return {};
  std::string lower(text);
  for (char& c : lower) {
    if (c >= 'A' && c <= 'Z') c = static_cast<char>(c - 'A' + 'a');
    if (c == '-' || c == ' ') c = '_';
  }
  std::size_t best = text.size() <= 4 ? 2 : 3;  // the first distance that is too far
  std::string_view nearest;
  for (const std::string_view word : words) {
    const std::size_t d = distance(lower, word);
    if (d < best) {
      best = d;
      nearest = word;
    }
  }
  return nearest.empty() ? std::string{} : fmt::format("; did you mean \"{}\"?", nearest);
}

}  // namespace weir::yaml
