#include <weir/limits/matching/rule_index.h>

#include <algorithm>
#include <bit>
#include <cstring>
#include <deque>
#include <map>
#include <numeric>
#include <span>
#include <string>
#include <tuple>
#include <utility>
#include <variant>

#include <weir/limits/matching/address.h>
#include <weir/limits/matching/number.h>
#include <weir/limits/matching/path.h>

namespace weir {
namespace {

std::uint64_t fold(std::uint64_t a, std::uint64_t b) {
  const Uint128 product = static_cast<Uint128>(a) * b;
  return static_cast<std::uint64_t>(product) ^ static_cast<std::uint64_t>(product >> 64);
}

template <typename Word>
std::uint64_t load(const char* at) {
  Word word;
  std::memcpy(&word, at, sizeof word);
  return word;
}

Uint128 number_of(const internal::Address& address) {
  Uint128 number = 0;
  for (const std::uint8_t byte : address) number = number << 8 | byte;
  return number;
}

Uint128 mask_of(unsigned bits) {
  return bits == 0 ? 0 : ~Uint128{0} << (128 - bits);
}

/// One entry of a request that some rule may ask for.
struct Present {
  std::string_view value;
  std::uint32_t key = 0;
  bool hashed = false;
  enum class Parse : std::uint8_t { not_yet, address, other } parse = Parse::not_yet;
  std::uint64_t hash = 0;
  Uint128 address = 0;
};

/// A request's entries by the number of their key, kept per thread.
class Entries {
 public:
  /// Forgets the last request. At the start rather than at the end of a search, so that one that
  /// threw does no harm.
  void begin(std::size_t key_count) {
    for (const Present& each : present_) place_[each.key] = 0;
    present_.clear();
    if (place_.size() < key_count) place_.resize(key_count);
  }
  /// Of two entries with one key, the first counts: false of the others.
  bool add(std::uint32_t key, std::string_view value) {
    if (place_[key] != 0) return false;
    Present& entry = present_.emplace_back();
    entry.value = value;
    entry.key = key;
    place_[key] = static_cast<std::uint32_t>(present_.size());
    return true;
  }
  Present* find(std::uint32_t key) {
    const std::uint32_t place = place_[key];
    return place == 0 ? nullptr : &present_[place - 1];
  }
  std::vector<Present>& all() { return present_; }

 private:
  std::vector<Present> present_;
  std::vector<std::uint32_t> place_;  // in present_, from 1; 0: not there
};

/// Kept per thread, so that a search allocates nothing.
struct Work {
  Entries entries;
  std::vector<std::uint64_t> bits;
  std::deque<std::string> texts;  // views of values; they stay where they are
  std::size_t texts_used = 0;

  std::string& text() {
    if (texts_used == texts.size()) texts.emplace_back();
    std::string& next = texts[texts_used++];
    next.clear();
    return next;
  }
};

Work& work() {
  thread_local Work instance;
  return instance;
}

/// Sorts distinct numbers below `limit`. In linear time where they are many.
void sort(std::span<std::uint32_t> numbers, std::size_t limit, std::vector<std::uint64_t>& bits) {
  constexpr std::size_t kMany = 64;
  // Rules that are found together are in order already.
  if (std::is_sorted(numbers.begin(), numbers.end())) return;
  if (numbers.size() < kMany) {
    std::sort(numbers.begin(), numbers.end());
    return;
  }
  bits.assign(limit / 64 + 1, 0);
  for (const std::uint32_t number : numbers) bits[number / 64] |= std::uint64_t{1} << number % 64;
  auto out = numbers.begin();
  for (std::size_t i = 0; i < bits.size(); ++i) {
    for (std::uint64_t word = bits[i]; word != 0; word &= word - 1) {
      *out++ =
          static_cast<std::uint32_t>(i * 64) + static_cast<std::uint32_t>(std::countr_zero(word));
    }
  }
}

bool address_of(Present& entry, Uint128& out) {
  if (entry.parse == Present::Parse::not_yet) {
    internal::Address address{};
    const bool good = internal::read_address(entry.value, address);
    entry.parse = good ? Present::Parse::address : Present::Parse::other;
    entry.address = number_of(address);
  }
  out = entry.address;
  return entry.parse == Present::Parse::address;
}

}  // namespace

// TextMap

std::uint64_t RuleIndex::TextMap::hash_text(std::string_view text) {
  constexpr std::uint64_t kFactor = 0x9E37'79B9'7F4A'7C15;
  const char* at = text.data();
  std::size_t left = text.size();
  std::uint64_t hash = 0x2545'F491'4F6C'DD1D ^ left;
  for (; left > 8; left -= 8, at += 8) hash = fold(hash ^ load<std::uint64_t>(at), kFactor);
  std::uint64_t tail = 0;
  if (left == 8) {
    tail = load<std::uint64_t>(at);
  } else if (left >= 4) {
    tail = load<std::uint32_t>(at) << 32 | load<std::uint32_t>(at + left - 4);
  } else if (left > 0) {
    tail = load<std::uint8_t>(at) << 16 | load<std::uint8_t>(at + left / 2) << 8 |
           load<std::uint8_t>(at + left - 1);
  }
  return fold(hash ^ tail, kFactor);
}

std::uint64_t RuleIndex::TextMap::mix(std::uint32_t owner, std::uint64_t text_hash) {
  return fold(text_hash ^ (owner + 1) * 0xD6E8'FEB8'6659'FD93, 0xA076'1D64'78BD'642F);
}

void RuleIndex::TextMap::add(std::uint32_t owner, std::string_view text, std::uint32_t target) {
  items_.push_back({mix(owner, hash_text(text)), text.data(),
                    static_cast<std::uint32_t>(text.size()), owner, target});
}

void RuleIndex::TextMap::finish() {
  std::sort(items_.begin(), items_.end(), [](const Item& a, const Item& b) {
    return std::tuple(a.hash, a.owner, a.view()) < std::tuple(b.hash, b.owner, b.view());
  });
  items_.shrink_to_fit();
  const auto bits = static_cast<unsigned>(std::bit_width(items_.size() | 1));
  shift_ = 64 - bits;
  directory_.assign((std::size_t{1} << bits) + 1, 0);
  for (const Item& item : items_) ++directory_[(item.hash >> shift_) + 1];
  std::partial_sum(directory_.begin(), directory_.end(), directory_.begin());
}

std::uint32_t RuleIndex::TextMap::find(std::uint32_t owner, std::string_view text,
                                       std::uint64_t text_hash) const {
  constexpr std::uint32_t kFew = 8;
  const std::uint64_t hash = mix(owner, text_hash);
  const std::uint64_t slot = hash >> shift_;
  const Item* at = items_.data() + directory_[slot];
  const Item* const end = items_.data() + directory_[slot + 1];
  if (end - at > kFew) {  // only where somebody chose the texts for it
    at = std::lower_bound(at, end, std::tuple(hash, owner, text),
                          [](const Item& item, const auto& wanted) {
                            return std::tuple(item.hash, item.owner, item.view()) < wanted;
                          });
  }
  for (; at != end && at->hash <= hash; ++at) {
    if (at->hash == hash && at->owner == owner && at->view() == text) return at->target;
  }
  return kNone;
}

std::size_t RuleIndex::TextMap::memory() const {
  return items_.capacity() * sizeof(Item) + directory_.capacity() * sizeof(std::uint32_t);
}

// Building

class RuleIndex::Builder {
 public:
  Builder(const std::vector<Rule>& rules, RuleIndex& index) : rules_(rules), index_(index) {}

  void build() {
    number_keys();
    for (std::size_t i = 0; i < rules_.size(); ++i) collect(static_cast<std::uint32_t>(i));
    find_distinct();
    rank();
    order_rules();
    index_.nodes_.emplace_back();
    pending_.push_back({0, {0, static_cast<std::uint32_t>(order_.size())}, 0});
    while (!pending_.empty()) {
      const Pending next = pending_.back();
      pending_.pop_back();
      make_node(next);
    }
    index_.exact_.finish();
  }

 private:
  /// What a condition asks, whoever has it.
  struct What {
    Kind kind = Kind::any;
    std::uint32_t key = 0;
    std::uint64_t hash = 0;  // of an exact text, so that most comparisons are of numbers
    std::string_view text;
    Uint128 network = 0;
    unsigned bits = 0;
    auto tied() const { return std::tie(kind, key, hash, text, network, bits); }
    bool operator<(const What& other) const { return tied() < other.tied(); }
    bool operator==(const What& other) const { return tied() == other.tied(); }
  };
  struct Condition {
    What what;
    std::uint32_t variant = 0;
  };
  /// A rule, with one of the values of the list in it that it is looked up by.
  struct Variant {
    std::uint32_t rule = 0;
    Range others;  // in others_
  };
  struct Pending {
    std::uint32_t node = 0;
    Range rules;  // in order_
    std::uint32_t depth = 0;
  };
  struct Group {
    std::uint32_t what = 0;  // in distinct_
    std::uint32_t target = 0;
  };

  const std::vector<Rule>& rules_;
  RuleIndex& index_;
  std::map<std::string_view, std::uint32_t> keys_;
  std::map<std::pair<std::uint32_t, View>, std::uint32_t> views_;  // by the key's number
  std::vector<Variant> variants_;                                  // in rule order
  std::vector<const Match*> others_;  // of a rule: what is left to check of all its variants
  std::vector<Condition> conditions_;
  std::vector<What> distinct_;           // sorted
  std::vector<double> weights_;          // of distinct_: the share of requests that may meet it
  std::vector<std::uint32_t> by_rank_;   // in distinct_
  std::vector<std::uint32_t> sequence_;  // of all variants: ranks, ascending
  std::vector<std::uint32_t> begin_;     // of a variant's in sequence_, and one more
  std::vector<std::uint32_t> order_;     // variants by their sequences
  std::vector<Pending> pending_;

  void number_keys() {
    for (const Rule& rule : rules_) {
      for (const Match& match : rule.match) keys_.try_emplace(match.key);
      for (const std::string& key : rule.key) keys_.try_emplace(key);
    }
    for (auto& [key, number] : keys_) {
      number = index_.key_count_++;
      index_.keys_.add(0, key, number);
    }
    index_.keys_.finish();
  }

  /// The number of what is made of an entry's value.
  std::uint32_t view_of(std::uint32_t key, View view) {
    const auto [at, fresh] = views_.try_emplace({key, view}, 0);
    if (fresh) {
      at->second = index_.key_count_++;
      index_.views_.resize(index_.key_count_, Views{});
      index_.views_[key][view] = at->second;
    }
    return at->second;
  }

  void collect(std::uint32_t rule) {
    const Rule& from = rules_[rule];
    const Match* list = list_of(from);
    std::vector<What> what{exact(kDomain, from.domain)};
    const auto others = static_cast<std::uint32_t>(others_.size());
    for (const Match& match : from.match) {
      if (&match != list) add(match, keys_.find(match.key)->second, what);
    }
    for (const std::string& name : from.key) {
      const std::uint32_t key = keys_.find(name)->second;
      const bool implied =
          std::any_of(from.match.begin(), from.match.end(),
                      [&](const Match& match) { return match.key == name && match.needs_entry(); });
      if (!implied) what.push_back({Kind::any, key, 0, {}, 0, 0});
    }
    const Range range{others, size_of(others_)};
    if (list == nullptr) return add_variant(rule, range, what);
    what.emplace_back();
    const std::uint32_t key = keys_.find(list->key)->second;
    if (const auto* values = std::get_if<MatchIn>(&list->matcher)) {
      std::vector<std::string_view> distinct(values->values.begin(), values->values.end());
      std::sort(distinct.begin(), distinct.end());
      distinct.erase(std::unique(distinct.begin(), distinct.end()), distinct.end());
      for (const std::string_view value : distinct) {
        what.back() = exact(key, value);
        add_variant(rule, range, what);
      }
      return;
    }
    std::vector<What> networks;
    for (const MatchCidr& each : std::get<MatchCidrs>(list->matcher).networks) {
      networks.push_back(network(key, each));
    }
    std::sort(networks.begin(), networks.end());
    // Those inside another one are met with it, and the rule is to be found once.
    const What* outer = nullptr;
    for (const What& each : networks) {
      if (outer != nullptr && takes_in(*outer, each)) continue;
      outer = &each;
      what.back() = each;
      add_variant(rule, range, what);
    }
  }

  void add_variant(std::uint32_t rule, Range others, const std::vector<What>& what) {
    const std::uint32_t variant = size_of(variants_);
    variants_.push_back({rule, others});
    for (const What& each : what) conditions_.push_back({each, variant});
  }

  /// The list by which the rule is looked up: the longest, if there is one and room for it.
  const Match* list_of(const Rule& rule) const {
    constexpr std::size_t kMaxVariants = 1u << 20;
    const Match* longest = nullptr;
    std::size_t most = 0;
    for (const Match& match : rule.match) {
      const auto* values = std::get_if<MatchIn>(&match.matcher);
      const auto* networks = std::get_if<MatchCidrs>(&match.matcher);
      const std::size_t size = values != nullptr     ? values->values.size()
                               : networks != nullptr ? networks->networks.size()
                                                     : 0;
      if (match.negated || size <= most) continue;
      longest = &match;
      most = size;
    }
    return variants_.size() + most > kMaxVariants ? nullptr : longest;
  }

  /// What edges can say of a matcher goes to `what`, the rest to others_.
  void add(const Match& match, std::uint32_t key, std::vector<What>& what) {
    const Matcher& matcher = match.matcher;
    if (std::holds_alternative<MatchAbsent>(matcher)) {
      what.push_back({match.negated ? Kind::any : Kind::absent, key, 0, {}, 0, 0});
    } else if (match.negated) {
      others_.push_back(&match);
    } else if (const auto* value = std::get_if<MatchExact>(&matcher)) {
      what.push_back(exact(key, value->value));
    } else if (const auto* prefix = std::get_if<MatchPrefix>(&matcher)) {
      what.push_back({Kind::prefix, key, 0, prefix->prefix, 0, 0});
    } else if (const auto* cidr = std::get_if<MatchCidr>(&matcher)) {
      what.push_back(network(key, *cidr));
    } else if (const auto* suffix = std::get_if<MatchSuffix>(&matcher)) {
      what.push_back(ends_with(key, suffix->suffix));
    } else if (const auto* number = std::get_if<MatchNumber>(&matcher)) {
      what.push_back(range(key, *number));
    } else if (const auto* path = std::get_if<MatchPath>(&matcher)) {
      const View view = path->ignore_case ? View::folded_path : View::path;
      const std::string_view text = kept(view, path->path);
      what.push_back(path->below ? What{Kind::prefix, view_of(key, view), 0, text, 0, 0}
                                 : exact(view_of(key, view), text));
    } else {
      what.push_back({Kind::any, key, 0, {}, 0, 0});
      if (const auto* glob = std::get_if<MatchGlob>(&matcher)) narrow(*glob, key, what.back());
      if (!std::holds_alternative<MatchAny>(matcher)) others_.push_back(&match);
    }
  }

  /// Finds a pattern by what it begins with, or else by what it ends with.
  void narrow(const MatchGlob& glob, std::uint32_t key, What& what) {
    std::string begins;
    std::string ends;
    bool wild = false;
    for (std::size_t i = 0; i < glob.pattern.size(); ++i) {
      char c = glob.pattern[i];
      const bool escaped = c == '\\' && i + 1 < glob.pattern.size();
      if (escaped) c = glob.pattern[++i];
      if (!escaped && (c == '*' || c == '?')) {
        wild = true;
        ends.clear();
      } else {
        (wild ? ends : begins) += c;
      }
    }
    if (!begins.empty()) {
      what.kind = Kind::prefix;
      what.text = index_.texts_.emplace_back(std::move(begins));
    } else if (!ends.empty()) {
      what = ends_with(key, ends);
    }
  }

  std::string_view kept(View view, std::string_view value) {
    std::string& text = index_.texts_.emplace_back();
    make_view(view, value, text);
    return text;
  }

  What ends_with(std::uint32_t key, std::string_view suffix) {
    return {Kind::prefix, view_of(key, View::reversed), 0, kept(View::reversed, suffix), 0, 0};
  }

  static What exact(std::uint32_t key, std::string_view value) {
    return {Kind::exact, key, TextMap::hash_text(value), value, 0, 0};
  }

  /// The bounds stand in `network`, the lower one in front: so ranges are sorted by it.
  static What range(std::uint32_t key, const MatchNumber& number) {
    return {Kind::range, key, 0, {}, static_cast<Uint128>(number.low) << 64 | number.high, 0};
  }
  static CheckedRange bounds_of(const What& what) {
    return {static_cast<std::uint64_t>(what.network >> 64),
            static_cast<std::uint64_t>(what.network)};
  }

  static What network(std::uint32_t key, const MatchCidr& cidr) {
    const unsigned bits = std::min(cidr.bits, 128u);
    return {Kind::cidr, key, 0, {}, number_of(cidr.network) & mask_of(bits), bits};
  }

  /// Fills distinct_ and weights_; conditions_ are sorted alike.
  void find_distinct() {
    std::sort(conditions_.begin(), conditions_.end(),
              [](const Condition& a, const Condition& b) { return a.what < b.what; });
    std::vector<std::uint32_t> uses;
    for (const Condition& each : conditions_) {
      if (distinct_.empty() || !(distinct_.back() == each.what)) {
        distinct_.push_back(each.what);
        uses.push_back(0);
      }
      ++uses.back();
    }
    weights_.resize(distinct_.size());
    for (std::size_t begin = 0; begin < distinct_.size();) {
      std::size_t end = begin;
      while (end < distinct_.size() && distinct_[end].kind == distinct_[begin].kind &&
             distinct_[end].key == distinct_[begin].key) {
        ++end;
      }
      weigh(begin, end, uses[begin]);
      begin = end;
    }
  }

  /// [begin, end) of distinct_ are all of one kind and key.
  void weigh(std::size_t begin, std::size_t end, std::uint32_t uses) {
    const What& first = distinct_[begin];
    if (first.kind == Kind::absent) {
      weights_[begin] = 1;
    } else if (first.kind == Kind::any) {
      // Worse than any value, and the worse the more rules have it.
      weights_[begin] = 0.5 + 0.5 * uses / static_cast<double>(rules_.size());
    } else if (first.key == kDomain) {
      std::fill(weights_.begin() + static_cast<std::ptrdiff_t>(begin),
                weights_.begin() + static_cast<std::ptrdiff_t>(end), 0);
    } else {
      // Values that this one takes in, of those that the rules name and one other.
      std::vector<std::size_t> outer = outer_of(begin, end);
      std::vector<double> covered(end - begin, 1);
      for (std::size_t i = end - begin; i-- > 0;) {
        if (outer[i] != end) covered[outer[i] - begin] += covered[i];
        weights_[begin + i] = covered[i] / static_cast<double>(end - begin + 1);
      }
    }
  }

  /// For each of [begin, end), the closest one that holds whatever it holds; `end` if none does.
  std::vector<std::size_t> outer_of(std::size_t begin, std::size_t end) const {
    std::vector<std::size_t> outer;
    std::vector<std::size_t> around;
    for (std::size_t i = begin; i < end; ++i) {
      while (!around.empty() && !takes_in(distinct_[around.back()], distinct_[i])) {
        around.pop_back();
      }
      outer.push_back(around.empty() ? end : around.back());
      around.push_back(i);
    }
    return outer;
  }

  static bool takes_in(const What& outer, const What& inner) {
    if (outer.kind == Kind::prefix) return inner.text.starts_with(outer.text);
    if (outer.kind != Kind::cidr) return false;
    return outer.bits <= inner.bits && (inner.network & mask_of(outer.bits)) == outer.network;
  }

  void rank() {
    by_rank_.resize(distinct_.size());
    std::iota(by_rank_.begin(), by_rank_.end(), 0);
    std::sort(by_rank_.begin(), by_rank_.end(), [this](std::uint32_t a, std::uint32_t b) {
      return std::tuple(weights_[a], a) < std::tuple(weights_[b], b);
    });
    std::vector<std::uint32_t> rank_of(distinct_.size());
    for (std::uint32_t i = 0; i < by_rank_.size(); ++i) rank_of[by_rank_[i]] = i;

    begin_.assign(variants_.size() + 1, 0);
    for (const Condition& each : conditions_) ++begin_[each.variant + 1];
    std::partial_sum(begin_.begin(), begin_.end(), begin_.begin());
    sequence_.resize(conditions_.size());
    std::vector<std::uint32_t> next(begin_.begin(), begin_.end() - 1);
    std::uint32_t what = 0;
    for (const Condition& each : conditions_) {
      if (!(distinct_[what] == each.what)) ++what;
      sequence_[next[each.variant]++] = rank_of[what];
    }
    conditions_ = {};
  }

  std::uint32_t length(std::uint32_t variant) const {
    return begin_[variant + 1] - begin_[variant];
  }

  void order_rules() {
    for (std::size_t i = 0; i < variants_.size(); ++i) {
      std::sort(sequence_.begin() + begin_[i], sequence_.begin() + begin_[i + 1]);
    }
    order_.resize(variants_.size());
    std::iota(order_.begin(), order_.end(), 0);
    std::stable_sort(order_.begin(), order_.end(), [this](std::uint32_t a, std::uint32_t b) {
      return std::lexicographical_compare(
          sequence_.begin() + begin_[a], sequence_.begin() + begin_[a + 1],
          sequence_.begin() + begin_[b], sequence_.begin() + begin_[b + 1]);
    });
  }

  /// The rules of a node have their first `depth` conditions in common.
  void make_node(const Pending& work) {
    Node node;
    std::uint32_t at = work.rules.begin;
    const bool few = work.rules.end - at <= kScanned;
    node.certain.begin = size_of(index_.certain_);
    node.candidates.begin = size_of(index_.candidates_);
    // Those without a further condition come first, and among themselves in rule order.
    for (; at < work.rules.end && length(order_[at]) == work.depth; ++at) {
      const Variant& variant = variants_[order_[at]];
      if (variant.others.begin == variant.others.end) {
        index_.certain_.push_back(variant.rule);
      } else {
        add_candidate(order_[at], work.depth);
      }
    }
    node.certain.end = size_of(index_.certain_);
    if (few) {
      for (; at < work.rules.end; ++at) add_candidate(order_[at], work.depth);
    }
    node.candidates.end = size_of(index_.candidates_);
    add_edges(node, {at, work.rules.end}, work.depth);
    index_.nodes_[work.node] = node;
  }

  void add_candidate(std::uint32_t number, std::uint32_t depth) {
    const Variant& variant = variants_[number];
    Candidate candidate;
    candidate.rule = variant.rule;
    candidate.checks = size_of(index_.checks_);
    for (std::uint32_t i = begin_[number] + depth; i < begin_[number + 1]; ++i) {
      const What& what = distinct_[by_rank_[sequence_[i]]];
      Check check;
      check.kind = what.kind;
      check.key = what.key;
      if (what.kind == Kind::cidr) {
        check.size = size_of(index_.checked_networks_);
        index_.checked_networks_.push_back({what.network, mask_of(what.bits)});
      } else if (what.kind == Kind::range) {
        check.size = size_of(index_.checked_ranges_);
        index_.checked_ranges_.push_back(bounds_of(what));
      } else {
        check.text = what.text.data();
        check.size = static_cast<std::uint32_t>(what.text.size());
      }
      index_.checks_.push_back(check);
    }
    for (std::uint32_t i = variant.others.begin; i < variant.others.end; ++i) {
      Check check;
      check.kind = Kind::other;
      check.key = keys_.find(others_[i]->key)->second;
      check.size = size_of(index_.others_);
      index_.others_.push_back(others_[i]);
      index_.checks_.push_back(check);
    }
    candidate.check_count = size_of(index_.checks_) - candidate.checks;
    index_.candidates_.push_back(candidate);
  }

  void add_edges(Node& node, Range rules, std::uint32_t depth) {
    std::vector<Group> groups;
    for (std::uint32_t at = rules.begin; at < rules.end;) {
      const std::uint32_t rank = rank_at(at, depth);
      Pending child{size_of(index_.nodes_), {at, at}, depth + 1};
      while (child.rules.end < rules.end && rank_at(child.rules.end, depth) == rank) {
        ++child.rules.end;
      }
      at = child.rules.end;
      groups.push_back({by_rank_[rank], child.node});
      index_.nodes_.emplace_back();
      pending_.push_back(child);
    }
    // By key, then as distinct_ is sorted: by kind and value.
    std::sort(groups.begin(), groups.end(), [this](const Group& a, const Group& b) {
      return std::tuple(distinct_[a.what].key, a.what) < std::tuple(distinct_[b.what].key, b.what);
    });
    node.tables.begin = size_of(index_.tables_);
    node.absences.begin = size_of(index_.absences_);
    for (auto at = groups.begin(); at != groups.end();) {
      const What& what = distinct_[at->what];
      const auto end = std::find_if(at, groups.end(), [&](const Group& group) {
        return distinct_[group.what].key != what.key || distinct_[group.what].kind != what.kind;
      });
      add_edges_of_one_kind(node, what, at, end);
      at = end;
    }
    node.tables.end = size_of(index_.tables_);
    node.absences.end = size_of(index_.absences_);
  }

  std::uint32_t rank_at(std::uint32_t place, std::uint32_t depth) const {
    return sequence_[begin_[order_[place]] + depth];
  }

  using Groups = std::vector<Group>::const_iterator;

  void add_edges_of_one_kind(const Node& node, const What& what, Groups begin, Groups end) {
    if (what.kind == Kind::absent) {
      index_.absences_.push_back({what.key, begin->target});
      return;
    }
    const bool fresh =
        node.tables.begin == size_of(index_.tables_) || index_.tables_.back().key != what.key;
    if (fresh) {
      Table table;
      table.key = what.key;
      index_.tables_.push_back(table);
    }
    const std::uint32_t number = size_of(index_.tables_) - 1;
    switch (what.kind) {
      case Kind::exact:
        for (auto at = begin; at != end; ++at) {
          index_.exact_.add(number, distinct_[at->what].text, at->target);
        }
        index_.tables_[number].exact = true;
        break;
      case Kind::prefix:
        index_.tables_[number].trie = make_trie(begin, end);
        break;
      case Kind::cidr:
        index_.tables_[number].networks = make_networks(begin, end);
        break;
      case Kind::range:
        index_.tables_[number].ranges = make_ranges(begin, end);
        break;
      case Kind::any:
        index_.tables_[number].any = begin->target;
        break;
      case Kind::absent:  // above
      case Kind::other:   // nothing leads on by it
        break;
    }
  }

  Range make_networks(Groups begin, Groups end) {
    const std::uint32_t first = size_of(index_.networks_);
    std::vector<Groups> around;
    for (auto at = begin; at != end; ++at) {
      const What& what = distinct_[at->what];
      while (!around.empty() && !takes_in(distinct_[around.back()->what], what)) around.pop_back();
      Network network;
      network.mask = mask_of(what.bits);
      network.target = at->target;
      if (!around.empty()) {
        network.outer = first + static_cast<std::uint32_t>(around.back() - begin);
      }
      index_.networks_.push_back(network);
      index_.network_starts_.push_back(what.network);
      around.push_back(at);
    }
    return {first, size_of(index_.networks_)};
  }

  std::uint32_t make_ranges(Groups begin, Groups end) {
    std::vector<std::uint64_t>& all = index_.range_bounds_;
    const auto first = static_cast<std::ptrdiff_t>(all.size());
    for (auto at = begin; at != end; ++at) {
      const CheckedRange range = bounds_of(distinct_[at->what]);
      if (range.low > 0) all.push_back(range.low);
      if (range.high < ~std::uint64_t{0}) all.push_back(range.high + 1);
    }
    std::sort(all.begin() + first, all.end());
    all.erase(std::unique(all.begin() + first, all.end()), all.end());
    RangeTree tree;
    tree.bounds = {static_cast<std::uint32_t>(first), size_of(all)};
    tree.leaves = std::bit_ceil(tree.bounds.end - tree.bounds.begin + 1);
    const auto leaf_of = [&](std::uint64_t number) {
      return tree.leaves +
             static_cast<std::uint32_t>(std::upper_bound(all.begin() + first, all.end(), number) -
                                        (all.begin() + first));
    };
    std::vector<std::pair<std::uint32_t, std::uint32_t>> edges;  // a node's, and where it leads
    for (auto at = begin; at != end; ++at) {
      const CheckedRange range = bounds_of(distinct_[at->what]);
      if (range.low > range.high) continue;  // no number is within
      std::uint32_t left = leaf_of(range.low);
      std::uint32_t right = leaf_of(range.high) + 1;
      for (; left < right; left /= 2, right /= 2) {
        if (left % 2 == 1) edges.emplace_back(left++, at->target);
        if (right % 2 == 1) edges.emplace_back(--right, at->target);
      }
    }
    std::sort(edges.begin(), edges.end());
    tree.nodes = size_of(index_.range_nodes_);
    auto edge = edges.begin();
    for (std::uint32_t node = 0; node < 2 * tree.leaves; ++node) {
      Range range{size_of(index_.range_targets_), 0};
      for (; edge != edges.end() && edge->first == node; ++edge) {
        index_.range_targets_.push_back(edge->second);
      }
      range.end = size_of(index_.range_targets_);
      index_.range_nodes_.push_back(range);
    }
    index_.range_trees_.push_back(tree);
    return size_of(index_.range_trees_) - 1;
  }

  struct Branch {
    std::uint32_t node = 0;
    Groups begin;
    Groups end;
    std::size_t depth = 0;  // bytes that all have in common and that are behind
  };

  std::uint32_t make_trie(Groups begin, Groups end) {
    const std::uint32_t root = add_trie_node(0);
    std::vector<Branch> branches{{root, begin, end, 0}};
    while (!branches.empty()) {
      const Branch branch = branches.back();
      branches.pop_back();
      split(branch, branches);
    }
    return root;
  }

  std::uint32_t add_trie_node(char byte) {
    index_.trie_.emplace_back();
    index_.trie_bytes_.push_back(byte);
    return size_of(index_.trie_) - 1;
  }

  void split(const Branch& branch, std::vector<Branch>& branches) {
    const auto text = [this](Groups at) { return distinct_[at->what].text; };
    const std::string_view first = text(branch.begin);
    const std::string_view last = text(branch.end - 1);
    // They are sorted: what the first and the last have in common, all have.
    const std::size_t shared = static_cast<std::size_t>(
        std::mismatch(first.begin() + static_cast<std::ptrdiff_t>(branch.depth), first.end(),
                      last.begin() + static_cast<std::ptrdiff_t>(branch.depth), last.end())
            .first -
        first.begin());
    TrieNode node;
    node.text = first.data() + branch.depth;
    node.size = static_cast<std::uint32_t>(shared - branch.depth);
    auto at = branch.begin;
    if (first.size() == shared) node.target = (at++)->target;
    node.children = size_of(index_.trie_);
    while (at != branch.end) {
      const char byte = text(at)[shared];
      const auto next = std::partition_point(at, branch.end, [&](const Group& group) {
        return static_cast<unsigned char>(distinct_[group.what].text[shared]) <=
               static_cast<unsigned char>(byte);
      });
      branches.push_back({add_trie_node(byte), at, next, shared + 1});
      ++node.child_count;
      at = next;
    }
    index_.trie_[branch.node] = node;
  }

  template <typename T>
  static std::uint32_t size_of(const std::vector<T>& list) {
    return static_cast<std::uint32_t>(list.size());
  }
};

RuleIndex::RuleIndex(const std::vector<Rule>& rules) : rule_count_(rules.size()) {
  Builder(rules, *this).build();
  nodes_.shrink_to_fit();
  certain_.shrink_to_fit();
  candidates_.shrink_to_fit();
  checks_.shrink_to_fit();
  checked_networks_.shrink_to_fit();
  checked_ranges_.shrink_to_fit();
  range_bounds_.shrink_to_fit();
  range_nodes_.shrink_to_fit();
  range_targets_.shrink_to_fit();
  others_.shrink_to_fit();
  tables_.shrink_to_fit();
  absences_.shrink_to_fit();
  trie_.shrink_to_fit();
  trie_bytes_.shrink_to_fit();
  networks_.shrink_to_fit();
  network_starts_.shrink_to_fit();
}

std::size_t RuleIndex::memory() const {
  const auto bytes = [](const auto& list) { return list.capacity() * sizeof(list[0]); };
  return keys_.memory() + exact_.memory() + bytes(nodes_) + bytes(certain_) + bytes(candidates_) +
         bytes(checks_) + bytes(checked_networks_) + bytes(tables_) + bytes(absences_) +
         bytes(trie_) + bytes(trie_bytes_) + bytes(networks_) + bytes(network_starts_) +
         bytes(checked_ranges_) + bytes(range_trees_) + bytes(range_bounds_) + bytes(range_nodes_) +
         bytes(range_targets_) + bytes(others_) + bytes(views_) +
         std::accumulate(texts_.begin(), texts_.end(), std::size_t{0},
                         [](std::size_t sum, const std::string& text) {
                           return sum + sizeof text + text.capacity();
                         });
}

// Searching

class RuleIndex::Search {
 public:
  Search(const RuleIndex& index, Entries& entries, std::vector<std::uint32_t>& out)
      : index_(index), entries_(entries), out_(out) {}

  void visit(std::uint32_t number) {
    const Node& node = index_.nodes_[number];
    out_.insert(out_.end(), index_.certain_.begin() + node.certain.begin,
                index_.certain_.begin() + node.certain.end);
    for (std::uint32_t i = node.candidates.begin; i < node.candidates.end; ++i) {
      if (holds(index_.candidates_[i])) out_.push_back(index_.candidates_[i].rule);
    }
    follow_tables(node.tables);
    for (std::uint32_t i = node.absences.begin; i < node.absences.end; ++i) {
      const Absence& absence = index_.absences_[i];
      if (entries_.find(absence.key) == nullptr) visit(absence.target);
    }
  }

 private:
  const RuleIndex& index_;
  Entries& entries_;
  std::vector<std::uint32_t>& out_;

  bool holds(const Candidate& candidate) {
    for (std::uint32_t i = 0; i < candidate.check_count; ++i) {
      if (!holds(index_.checks_[candidate.checks + i])) return false;
    }
    return true;
  }

  bool holds(const Check& check) {
    Present* entry = entries_.find(check.key);
    if (check.kind == Kind::other) {
      return index_.others_[check.size]->holds(entry == nullptr ? nullptr : &entry->value);
    }
    if (entry == nullptr) return check.kind == Kind::absent;
    switch (check.kind) {
      case Kind::exact:
        return entry->value == check.view();
      case Kind::prefix:
        return entry->value.starts_with(check.view());
      case Kind::cidr: {
        const CheckedNetwork& network = index_.checked_networks_[check.size];
        Uint128 address = 0;
        return address_of(*entry, address) && (address & network.mask) == network.start;
      }
      case Kind::range: {
        const CheckedRange& range = index_.checked_ranges_[check.size];
        std::uint64_t number = 0;
        return internal::read_number(entry->value, number) && number >= range.low &&
               number <= range.high;
      }
      case Kind::any:
        return true;
      case Kind::absent:
      case Kind::other:
        break;
    }
    return false;
  }

  void follow_tables(Range tables) {
    // Whichever are fewer, the node's keys or the request's.
    constexpr std::size_t kFew = 4;
    const std::size_t count = tables.end - tables.begin;
    if (count <= std::max(kFew, entries_.all().size())) {
      for (std::uint32_t i = tables.begin; i < tables.end; ++i) {
        Present* entry = entries_.find(index_.tables_[i].key);
        if (entry != nullptr) follow(i, *entry);
      }
      return;
    }
    const Table* const begin = index_.tables_.data() + tables.begin;
    const Table* const end = index_.tables_.data() + tables.end;
    for (Present& entry : entries_.all()) {
      const Table* at =
          std::lower_bound(begin, end, entry.key,
                           [](const Table& table, std::uint32_t key) { return table.key < key; });
      if (at == end || at->key != entry.key) continue;
      follow(static_cast<std::uint32_t>(at - index_.tables_.data()), entry);
    }
  }

  void follow(std::uint32_t number, Present& entry) {
    const Table& table = index_.tables_[number];
    if (table.exact) {
      if (!entry.hashed) {
        entry.hash = TextMap::hash_text(entry.value);
        entry.hashed = true;
      }
      const std::uint32_t target = index_.exact_.find(number, entry.value, entry.hash);
      if (target != kNone) visit(target);
    }
    if (table.any != kNone) visit(table.any);
    if (table.trie != kNone) follow_prefixes(table.trie, entry.value);
    if (table.networks.begin != table.networks.end) follow_networks(table.networks, entry);
    if (table.ranges != kNone) follow_ranges(index_.range_trees_[table.ranges], entry.value);
  }

  void follow_prefixes(std::uint32_t number, std::string_view rest) {
    while (true) {
      const TrieNode& node = index_.trie_[number];
      if (!rest.starts_with(std::string_view(node.text, node.size))) return;
      rest.remove_prefix(node.size);
      if (node.target != kNone) visit(node.target);
      if (rest.empty() || node.child_count == 0) return;
      const char* bytes = index_.trie_bytes_.data() + node.children;
      const void* found = std::memchr(bytes, rest.front(), node.child_count);
      if (found == nullptr) return;
      number = node.children + static_cast<std::uint32_t>(static_cast<const char*>(found) - bytes);
      rest.remove_prefix(1);
    }
  }

  void follow_ranges(const RangeTree& tree, std::string_view value) {
    std::uint64_t number = 0;
    if (!internal::read_number(value, number)) return;
    const std::uint64_t* const begin = index_.range_bounds_.data() + tree.bounds.begin;
    const std::uint64_t* const end = index_.range_bounds_.data() + tree.bounds.end;
    auto node =
        tree.leaves + static_cast<std::uint32_t>(std::upper_bound(begin, end, number) - begin);
    for (; node > 0; node /= 2) {
      const Range edges = index_.range_nodes_[tree.nodes + node];
      for (std::uint32_t i = edges.begin; i < edges.end; ++i) visit(index_.range_targets_[i]);
    }
  }

  /// Networks nest or are apart, so those around an address are the last one that starts at or
  /// before it and the ones around that, as far as they reach.
  void follow_networks(Range networks, Present& entry) {
    Uint128 address = 0;
    if (!address_of(entry, address)) return;
    // Without branches that depend on the address: half of them would be guessed wrongly.
    const Uint128* at = index_.network_starts_.data() + networks.begin;
    for (std::size_t left = networks.end - networks.begin; left > 1;) {
      const std::size_t half = left / 2;
      at += at[half] <= address ? half : 0;
      left -= half;
    }
    if (*at > address) return;
    auto number = static_cast<std::uint32_t>(at - index_.network_starts_.data());
    for (; number != kNone; number = index_.networks_[number].outer) {
      const Network& network = index_.networks_[number];
      if ((address & network.mask) == index_.network_starts_[number]) visit(network.target);
    }
  }
};

void RuleIndex::make_view(View view, std::string_view value, std::string& out) {
  if (view == View::reversed) {
    out.assign(value.rbegin(), value.rend());
  } else {
    internal::append_normal_path(value, view == View::folded_path, out);
  }
}

void RuleIndex::match(const Request& request, std::vector<std::uint32_t>& out) const {
  Work& w = work();
  Entries& entries = w.entries;
  entries.begin(key_count_);
  w.texts_used = 0;
  entries.add(kDomain, request.domain);
  for (const Entry& entry : request.descriptor) {
    const std::uint32_t key = keys_.find(0, entry.key, TextMap::hash_text(entry.key));
    if (key == kNone || !entries.add(key, entry.value) || views_.empty()) continue;
    for (std::size_t view = 0; view < views_[key].size(); ++view) {
      if (views_[key][view] == 0) continue;
      std::string& text = w.text();
      make_view(static_cast<View>(view), entry.value, text);
      entries.add(views_[key][view], text);
    }
  }
  const std::size_t first = out.size();
  Search(*this, entries, out).visit(0);
  sort(std::span(out).subspan(first), rule_count_, w.bits);
}

}  // namespace weir
