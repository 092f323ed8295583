#include <weir/rpc/wire.h>

#include <capnp/message.h>
#include <capnp/serialize.h>
#include <kj/exception.h>

#include <algorithm>
#include <cstring>
#include <limits>
#include <map>
#include <string_view>
#include <utility>

namespace weir::rpc {
namespace {

using Words = capnp::List<std::uint64_t>;

constexpr std::uint32_t kNoMember = 0xffffffff;
constexpr std::size_t kMaxStatuses = 1024;

bool fail(std::string& error, std::string what) {
  error = std::move(what);
  return false;
}

std::string at(const char* what, std::size_t index) {
  return std::string(what) + " " + std::to_string(index);
}

capnp::uint count(std::size_t n) {
  return static_cast<capnp::uint>(n);
}

kj::StringPtr text(const std::string& s) {
  return kj::StringPtr(s.c_str(), s.size());
}

std::string copy(capnp::Text::Reader in) {
  return std::string(in.cStr(), in.size());
}

/// Turns what KJ throws over malformed input into the error.
template <typename Body>
bool guarded(std::string& error, Body&& body) {
  bool ok = false;
  auto exception = kj::runCatchingExceptions([&] { ok = body(); });
  KJ_IF_MAYBE (e, exception) {
    return fail(error, "malformed: " + std::string(e->getDescription().cStr()));
  }
  return ok;
}

// ---- Groups ----

/// A shard that exists, and a generation whose end is an instant that can be computed.
bool valid_group(const crdt::Group& group) {
  const crdt::Generation& generation = group.generation;
  if (group.shard >= (1u << crdt::kShardBits)) return false;
  if (generation.is_bucket()) return generation == crdt::kBucketGeneration;
  constexpr std::int64_t kLast = (kMaxTime + 2 * crdt::kMaxLifetime) / kSecond;
  return generation.grain_log2 <= 32 && generation.number >= 0 &&
         generation.number <= (kLast >> generation.grain_log2);
}

template <typename Items, typename GroupOf>
bool encode_groups(const Items& items, schema::Groups::Builder out, GroupOf&& group_of,
                   std::string& error) {
  if (items.size() > crdt::kMaxOfferGroups) return fail(error, "too many groups");
  auto grain = out.initGrainLog2(count(items.size()));
  auto number = out.initNumber(count(items.size()));
  auto shard = out.initShard(count(items.size()));
  for (std::size_t i = 0; i < items.size(); ++i) {
    const crdt::Group& group = group_of(items[i]);
    if (!valid_group(group)) return fail(error, at("group", i) + " is not valid");
    grain.set(count(i), static_cast<std::int8_t>(group.generation.grain_log2));
    number.set(count(i), group.generation.number);
    shard.set(count(i), static_cast<std::uint16_t>(group.shard));
  }
  return true;
}

class GroupReader {
 public:
  explicit GroupReader(schema::Groups::Reader in)
      : grain_(in.getGrainLog2()), number_(in.getNumber()), shard_(in.getShard()) {}

  bool check(std::string& error) const {
    if (number_.size() > crdt::kMaxOfferGroups) return fail(error, "too many groups");
    if (grain_.size() != number_.size() || shard_.size() != number_.size()) {
      return fail(error, "group columns differ in length");
    }
    return true;
  }
  std::size_t size() const { return number_.size(); }
  bool get(std::size_t i, crdt::Group& out, std::string& error) const {
    out = {{grain_[count(i)], number_[count(i)]}, shard_[count(i)]};
    return valid_group(out) || fail(error, at("group", i) + " is not valid");
  }

 private:
  capnp::List<std::int8_t>::Reader grain_;
  capnp::List<std::int64_t>::Reader number_;
  capnp::List<std::uint16_t>::Reader shard_;
};

// ---- The messages ----

bool encode_as(const crdt::Push& in, schema::Push::Builder out, std::string& error) {
  write(in.pusher, out.initPusher());
  out.setAfter(in.after);
  out.setUpto(in.upto);
  out.setBase(in.base);
  return encode(in.delta, out.initDelta(), error);
}

bool decode_as(schema::Push::Reader in, crdt::Push& out, std::string& error) {
  out.pusher = read(in.getPusher());
  out.after = in.getAfter();
  out.upto = in.getUpto();
  out.base = in.getBase();
  return decode(in.getDelta(), out.delta, error);
}

bool encode_as(const crdt::Ack& in, schema::Ack::Builder out, std::string&) {
  write(in.pusher, out.initPusher());
  write(in.receiver, out.initReceiver());
  out.setUpto(in.upto);
  return true;
}

bool decode_as(schema::Ack::Reader in, crdt::Ack& out, std::string&) {
  out.pusher = read(in.getPusher());
  out.receiver = read(in.getReceiver());
  out.upto = in.getUpto();
  return true;
}

bool encode_as(const crdt::DigestOffer& in, schema::DigestOffer::Builder out, std::string& error) {
  out.setFloor(in.floor);
  out.setRound(in.round);
  if (!encode_groups(
          in.groups, out.initGroups(), [](auto& g) -> auto& { return g.group; }, error)) {
    return false;
  }
  auto digest = out.initDigest(count(in.groups.size()));
  for (std::size_t i = 0; i < in.groups.size(); ++i) digest.set(count(i), in.groups[i].digest);
  return true;
}

bool decode_as(schema::DigestOffer::Reader in, crdt::DigestOffer& out, std::string& error) {
  out.floor = in.getFloor();
  out.round = in.getRound();
  if (out.floor < 0 || out.floor > kMaxTime) return fail(error, "floor is out of range");
  GroupReader groups(in.getGroups());
  auto digest = in.getDigest();
  if (!groups.check(error)) return false;
  if (digest.size() != groups.size()) return fail(error, "digest columns differ in length");
  out.groups.resize(groups.size());
  for (std::size_t i = 0; i < groups.size(); ++i) {
    if (!groups.get(i, out.groups[i].group, error)) return false;
    out.groups[i].digest = digest[count(i)];
  }
  return true;
}

bool encode_as(const crdt::Inventory& in, schema::Inventory::Builder out, std::string& error) {
  out.setRound(in.round);
  out.setMore(in.more);
  if (!encode_groups(
          in.groups, out.initGroups(), [](auto& g) -> auto& { return g.group; }, error)) {
    return false;
  }
  std::size_t cells = 0;
  for (const auto& group : in.groups) cells += group.cells.size();
  if (cells > crdt::kMaxInventoryCells) return fail(error, "too many cells in an inventory");
  auto low = out.initLow(count(in.groups.size()));
  auto high = out.initHigh(count(in.groups.size()));
  auto cell_count = out.initCellCount(count(in.groups.size()));
  auto key = out.initCellKey(count(cells));
  auto digest = out.initCellDigest(count(cells));
  capnp::uint next = 0;
  for (std::size_t i = 0; i < in.groups.size(); ++i) {
    const auto& group = in.groups[i];
    low.set(count(i), group.low);
    high.set(count(i), group.high);
    cell_count.set(count(i), count(group.cells.size()));
    for (const auto& cell : group.cells) {
      key.set(next, cell.key);
      digest.set(next, cell.digest);
      ++next;
    }
  }
  return true;
}

bool decode_as(schema::Inventory::Reader in, crdt::Inventory& out, std::string& error) {
  out.round = in.getRound();
  out.more = in.getMore();
  GroupReader groups(in.getGroups());
  if (!groups.check(error)) return false;
  auto low = in.getLow();
  auto high = in.getHigh();
  auto cell_count = in.getCellCount();
  auto key = in.getCellKey();
  auto digest = in.getCellDigest();
  if (low.size() != groups.size() || high.size() != groups.size() ||
      cell_count.size() != groups.size()) {
    return fail(error, "inventory columns differ in length");
  }
  if (key.size() > crdt::kMaxInventoryCells) return fail(error, "too many cells in an inventory");
  if (digest.size() != key.size()) return fail(error, "inventory cell columns differ in length");
  out.groups.resize(groups.size());
  std::size_t next = 0;
  for (std::size_t i = 0; i < groups.size(); ++i) {
    auto& group = out.groups[i];
    if (!groups.get(i, group.group, error)) return false;
    group.low = low[count(i)];
    group.high = high[count(i)];
    std::size_t n = cell_count[count(i)];
    if (n > key.size() - next)
      return fail(error, at("group", i) + " has more cells than there are");
    group.cells.resize(n);
    for (auto& cell : group.cells) {
      cell = {key[count(next)], digest[count(next)]};
      ++next;
    }
  }
  if (next != key.size()) return fail(error, "inventory cells that belong to no group");
  return true;
}

bool encode_as(const crdt::Repair& in, schema::Repair::Builder out, std::string& error) {
  if (!encode(in.delta, out.initDelta(), error)) return false;
  if (!encode_groups(
          in.wants, out.initGroups(), [](auto& g) -> auto& { return g.group; }, error)) {
    return false;
  }
  std::size_t keys = 0;
  for (const auto& want : in.wants) keys += want.keys.size();
  if (keys > crdt::kMaxInventoryCells) return fail(error, "too many wanted cells");
  auto key_count = out.initKeyCount(count(in.wants.size()));
  auto key = out.initKey(count(keys));
  capnp::uint next = 0;
  for (std::size_t i = 0; i < in.wants.size(); ++i) {
    key_count.set(count(i), count(in.wants[i].keys.size()));
    for (std::uint64_t k : in.wants[i].keys) key.set(next++, k);
  }
  return true;
}

bool decode_as(schema::Repair::Reader in, crdt::Repair& out, std::string& error) {
  if (!decode(in.getDelta(), out.delta, error)) return false;
  GroupReader groups(in.getGroups());
  if (!groups.check(error)) return false;
  auto key_count = in.getKeyCount();
  auto key = in.getKey();
  if (key_count.size() != groups.size()) return fail(error, "repair columns differ in length");
  if (key.size() > crdt::kMaxInventoryCells) return fail(error, "too many wanted cells");
  out.wants.resize(groups.size());
  std::size_t next = 0;
  for (std::size_t i = 0; i < groups.size(); ++i) {
    auto& want = out.wants[i];
    if (!groups.get(i, want.group, error)) return false;
    std::size_t n = key_count[count(i)];
    if (n > key.size() - next) return fail(error, at("group", i) + " wants more than there is");
    want.keys.resize(n);
    for (auto& k : want.keys) k = key[count(next++)];
  }
  if (next != key.size()) return fail(error, "wanted cells that belong to no group");
  return true;
}

bool instant(Nanos at) {
  return at >= 0 && at <= kMaxTime;
}

bool encode_as(const crdt::RightsRequest& in, schema::RightsRequest::Builder out,
               std::string& error) {
  if (!crdt::valid_epoch(in.cell.epoch)) return fail(error, "rights of no window");
  out.setRuleHi(in.rule.hi);
  out.setRuleLo(in.rule.lo);
  out.setSeriesHi(in.cell.series.hi);
  out.setSeriesLo(in.cell.series.lo);
  out.setEpochStart(in.cell.epoch.start);
  out.setEpochExpiry(in.cell.epoch.expiry);
  out.setWanted(in.wanted);
  return true;
}

bool decode_as(schema::RightsRequest::Reader in, crdt::RightsRequest& out, std::string& error) {
  out.rule = {in.getRuleHi(), in.getRuleLo()};
  out.cell = {{in.getSeriesHi(), in.getSeriesLo()}, {in.getEpochStart(), in.getEpochExpiry()}};
  out.wanted = in.getWanted();
  return crdt::valid_epoch(out.cell.epoch) || fail(error, "rights of no window");
}

bool encode_as(const crdt::RejoinRequest& in, schema::RejoinRequest::Builder out,
               std::string& error) {
  if (!instant(in.at)) return fail(error, "a rejoin request's time is out of range");
  write(in.incarnation, out.initIncarnation());
  out.setAtNs(in.at);
  out.setVersion(in.version);
  return true;
}

bool decode_as(schema::RejoinRequest::Reader in, crdt::RejoinRequest& out, std::string& error) {
  out.incarnation = read(in.getIncarnation());
  out.at = in.getAtNs();
  out.version = in.getVersion();
  return instant(out.at) || fail(error, "a rejoin request's time is out of range");
}

bool encode_as(const crdt::RejoinConfirmation& in, schema::RejoinConfirmation::Builder out,
               std::string& error) {
  if (!instant(in.at) || !instant(in.now))
    return fail(error, "a rejoin confirmation's time is out of range");
  write(in.incarnation, out.initIncarnation());
  out.setAtNs(in.at);
  out.setNowNs(in.now);
  out.setRows(in.rows);
  return true;
}

bool decode_as(schema::RejoinConfirmation::Reader in, crdt::RejoinConfirmation& out,
               std::string& error) {
  out.incarnation = read(in.getIncarnation());
  out.at = in.getAtNs();
  out.now = in.getNowNs();
  out.rows = in.getRows();
  return (instant(out.at) && instant(out.now)) ||
         fail(error, "a rejoin confirmation's time is out of range");
}

// ---- Deltas ----

/// Every incarnation that a delta names, once. Sorted rather than hashed: ids are chosen by others,
/// who could make them collide.
class WriterTable {
 public:
  explicit WriterTable(const crdt::Delta& delta) {
    for (const auto& cell : delta.cells) {
      for (const auto& slot : cell.slots) add(slot.id.writer);
    }
    for (const auto& [id, member] : delta.members) add(id);
    std::sort(ids_.begin(), ids_.end());
    ids_.erase(std::unique(ids_.begin(), ids_.end()), ids_.end());
  }
  const std::vector<crdt::Incarnation>& ids() const { return ids_; }
  std::uint32_t index(const crdt::Incarnation& id) {
    if (last_ >= ids_.size() || ids_[last_] != id) {
      auto found = std::lower_bound(ids_.begin(), ids_.end(), id);
      last_ = static_cast<std::size_t>(found - ids_.begin());
    }
    return static_cast<std::uint32_t>(last_);
  }

 private:
  void add(const crdt::Incarnation& id) {
    if (ids_.empty() || ids_.back() != id) ids_.push_back(id);
  }
  std::vector<crdt::Incarnation> ids_;
  std::size_t last_ = 0;
};

bool decode_writers(schema::Delta::Reader in, std::vector<crdt::Incarnation>& writers,
                    std::map<crdt::Incarnation, crdt::Member>& members, std::string& error) {
  auto names = in.getMembers();
  if (names.size() > kMaxDeltaMembers) return fail(error, "too many members");
  std::vector<crdt::Member> table(names.size());
  for (std::size_t i = 0; i < table.size(); ++i) {
    if (!read(names[count(i)], table[i])) return fail(error, at("member", i) + " has a long name");
  }

  auto hi = in.getWriterHi();
  auto lo = in.getWriterLo();
  auto owner = in.getWriterMember();
  if (hi.size() > kMaxDeltaWriters) return fail(error, "too many writers");
  if (lo.size() != hi.size() || owner.size() != hi.size()) {
    return fail(error, "writer columns differ in length");
  }
  writers.resize(hi.size());
  for (std::size_t i = 0; i < writers.size(); ++i) {
    writers[i] = {hi[count(i)], lo[count(i)]};
    if (!writers[i]) return fail(error, at("writer", i) + " is no incarnation");
    std::uint32_t m = owner[count(i)];
    if (m == kNoMember) continue;
    if (m >= table.size()) return fail(error, at("writer", i) + " belongs to no listed member");
    members.emplace(writers[i], table[m]);
  }
  auto sorted = writers;
  std::sort(sorted.begin(), sorted.end());
  if (std::adjacent_find(sorted.begin(), sorted.end()) != sorted.end()) {
    return fail(error, "a writer repeats");
  }
  return true;
}

/// Members may be described that have no slot here, and slots sent whose member is not known.
bool encode_writers(const crdt::Delta& delta, const WriterTable& writers,
                    schema::Delta::Builder out, std::string& error) {
  std::map<crdt::Member, std::uint32_t> names;
  for (const auto& [id, member] : delta.members) {
    if (!id) return fail(error, "a member's incarnation is zero");
    if (member.region.size() > kMaxName || member.node.size() > kMaxName) {
      return fail(error, "a member has a long name");
    }
    names.try_emplace(member, static_cast<std::uint32_t>(names.size()));
  }
  if (names.size() > kMaxDeltaMembers) return fail(error, "too many members");
  auto members = out.initMembers(count(names.size()));
  for (const auto& [member, index] : names) write(member, members[index]);
  auto hi = out.initWriterHi(count(writers.ids().size()));
  auto lo = out.initWriterLo(count(writers.ids().size()));
  auto owner = out.initWriterMember(count(writers.ids().size()));
  for (std::size_t i = 0; i < writers.ids().size(); ++i) {
    hi.set(count(i), writers.ids()[i].hi);
    lo.set(count(i), writers.ids()[i].lo);
    auto member = delta.members.find(writers.ids()[i]);
    owner.set(count(i), member == delta.members.end() ? kNoMember : names.at(member->second));
  }
  return true;
}

/// The columns of a delta's cells, filled cell by cell.
class CellsOut {
 public:
  struct Size {
    std::size_t cells = 0;
    std::size_t slots = 0;
    std::size_t buckets = 0;
    bool births = false;  ///< slots that have one
  };
  static Size size_of(const crdt::Delta& delta) {
    Size out;
    out.cells = delta.cells.size();
    for (const crdt::Cell& cell : delta.cells) {
      out.slots += cell.slots.size();
      out.buckets += cell.id.is_bucket() ? 1 : 0;
      for (const crdt::Slot& slot : cell.slots) out.births |= slot.id.birth != 0;
    }
    return out;
  }

  CellsOut(schema::Delta::Builder out, const Size& size, WriterTable& writers)
      : writers_(writers),
        series_hi_(out.initSeriesHi(count(size.cells))),
        series_lo_(out.initSeriesLo(count(size.cells))),
        start_(out.initEpochStart(count(size.cells))),
        expiry_(out.initEpochExpiry(count(size.cells))),
        slot_count_(out.initSlotCount(count(size.cells))),
        slot_writer_(out.initSlotWriter(count(size.slots))),
        slot_value_(out.initSlotValue(count(size.slots))),
        counted_(out.initBucketCounted(count(size.buckets))),
        checked_(out.initBucketAt(count(size.buckets))),
        debt_hi_(out.initBucketDebtHi(count(size.buckets))),
        debt_lo_(out.initBucketDebtLo(count(size.buckets))),
        touched_(out.initBucketTouched(count(size.buckets))),
        bucket_expiry_(out.initBucketExpiry(count(size.buckets))),
        births_(size.births) {
    if (births_) slot_birth_ = out.initSlotBirth(count(size.slots));
  }

  void add(const crdt::Cell& cell) {
    series_hi_.set(cell_, cell.id.series.hi);
    series_lo_.set(cell_, cell.id.series.lo);
    start_.set(cell_, cell.id.epoch.start);
    expiry_.set(cell_, cell.id.epoch.expiry);
    slot_count_.set(cell_, count(cell.slots.size()));
    ++cell_;
    for (const crdt::Slot& slot : cell.slots) {
      slot_writer_.set(slot_, writers_.index(slot.id.writer));
      slot_value_.set(slot_, slot.value);
      if (births_) slot_birth_.set(slot_, slot.id.birth);
      ++slot_;
    }
    if (cell.id.is_bucket()) add(cell.bucket);
  }

 private:
  using UInt32s = capnp::List<std::uint32_t>::Builder;
  using UInt64s = capnp::List<std::uint64_t>::Builder;
  using Int64s = capnp::List<std::int64_t>::Builder;

  void add(const crdt::BucketState& state) {
    counted_.set(bucket_, state.checkpoint.counted);
    checked_.set(bucket_, state.checkpoint.at);
    debt_hi_.set(bucket_, static_cast<std::uint64_t>(state.checkpoint.debt >> 64));
    debt_lo_.set(bucket_, static_cast<std::uint64_t>(state.checkpoint.debt));
    touched_.set(bucket_, state.touched);
    bucket_expiry_.set(bucket_, state.expiry);
    ++bucket_;
  }

  WriterTable& writers_;
  UInt64s series_hi_;
  UInt64s series_lo_;
  Int64s start_;
  Int64s expiry_;
  UInt32s slot_count_;
  UInt32s slot_writer_;
  UInt64s slot_birth_;
  UInt64s slot_value_;
  UInt64s counted_;
  Int64s checked_;
  UInt64s debt_hi_;
  UInt64s debt_lo_;
  Int64s touched_;
  Int64s bucket_expiry_;
  const bool births_;
  capnp::uint cell_ = 0;
  capnp::uint slot_ = 0;
  capnp::uint bucket_ = 0;
};

/// The columns of a delta's cells as they came: of any length, until check() has compared them.
class CellsIn {
 public:
  explicit CellsIn(schema::Delta::Reader in)
      : series_hi_(in.getSeriesHi()),
        series_lo_(in.getSeriesLo()),
        start_(in.getEpochStart()),
        expiry_(in.getEpochExpiry()),
        slot_count_(in.getSlotCount()),
        slot_writer_(in.getSlotWriter()),
        slot_birth_(in.getSlotBirth()),
        slot_value_(in.getSlotValue()),
        counted_(in.getBucketCounted()),
        checked_(in.getBucketAt()),
        debt_hi_(in.getBucketDebtHi()),
        debt_lo_(in.getBucketDebtLo()),
        touched_(in.getBucketTouched()),
        bucket_expiry_(in.getBucketExpiry()) {}

  std::size_t size() const { return series_hi_.size(); }

  bool check(std::string& error) const {
    const auto cells = series_hi_.size();
    if (cells > crdt::kMaxDeltaCells) return fail(error, "too many cells in a delta");
    if (series_lo_.size() != cells || start_.size() != cells || expiry_.size() != cells ||
        slot_count_.size() != cells) {
      return fail(error, "cell columns differ in length");
    }
    const auto slots = slot_value_.size();
    if (slots > crdt::kMaxDeltaSlots) return fail(error, "too many slots in a delta");
    if (slot_writer_.size() != slots || (slot_birth_.size() != slots && slot_birth_.size() != 0)) {
      return fail(error, "slot columns differ in length");
    }
    const auto buckets = counted_.size();
    if (buckets > cells) return fail(error, "more buckets than cells");
    if (checked_.size() != buckets || debt_hi_.size() != buckets || debt_lo_.size() != buckets ||
        touched_.size() != buckets || bucket_expiry_.size() != buckets) {
      return fail(error, "bucket columns differ in length");
    }
    return true;
  }

  bool next(const std::vector<crdt::Incarnation>& writers, crdt::Cell& out, std::string& error) {
    const auto named = [cell = cell_](const char* what) { return at("cell", cell) + what; };
    out.id = {{series_hi_[cell_], series_lo_[cell_]}, {start_[cell_], expiry_[cell_]}};
    const std::uint32_t slots = slot_count_[cell_];
    ++cell_;
    if (slots > slot_value_.size() - slot_) {
      return fail(error, named(" has more slots than there are"));
    }
    out.slots.resize(slots);
    for (crdt::Slot& slot : out.slots) {
      const std::uint32_t writer = slot_writer_[slot_];
      if (writer >= writers.size()) return fail(error, at("slot", slot_) + " has no listed writer");
      const std::uint64_t birth = slot_birth_.size() != 0 ? slot_birth_[slot_] : 0;
      slot = {{writers[writer], birth}, slot_value_[slot_]};
      ++slot_;
    }
    if (out.id.is_bucket()) {
      if (bucket_ == counted_.size()) return fail(error, named(" is a bucket without its row"));
      next(out.bucket);
    }
    return crdt::valid(out) || fail(error, named(" is not valid"));
  }

  /// Behind the last cell: nothing is left over.
  bool done(std::string& error) const {
    if (slot_ != slot_value_.size()) return fail(error, "slots that belong to no cell");
    if (bucket_ != counted_.size()) return fail(error, "bucket rows that belong to no cell");
    return true;
  }

 private:
  using UInt32s = capnp::List<std::uint32_t>::Reader;
  using UInt64s = capnp::List<std::uint64_t>::Reader;
  using Int64s = capnp::List<std::int64_t>::Reader;

  void next(crdt::BucketState& out) {
    const auto debt = static_cast<crdt::DebtTicks>(debt_hi_[bucket_]) << 64 | debt_lo_[bucket_];
    out = {
        {counted_[bucket_], checked_[bucket_], debt}, touched_[bucket_], bucket_expiry_[bucket_]};
    ++bucket_;
  }

  UInt64s series_hi_;
  UInt64s series_lo_;
  Int64s start_;
  Int64s expiry_;
  UInt32s slot_count_;
  UInt32s slot_writer_;
  UInt64s slot_birth_;
  UInt64s slot_value_;
  UInt64s counted_;
  Int64s checked_;
  UInt64s debt_hi_;
  UInt64s debt_lo_;
  Int64s touched_;
  Int64s bucket_expiry_;
  capnp::uint cell_ = 0;
  capnp::uint slot_ = 0;
  capnp::uint bucket_ = 0;
};

}  // namespace

crdt::Incarnation read(schema::Incarnation::Reader in) {
  return {in.getHi(), in.getLo()};
}

void write(const crdt::Incarnation& id, schema::Incarnation::Builder out) {
  out.setHi(id.hi);
  out.setLo(id.lo);
}

bool read(schema::Member::Reader in, crdt::Member& out) {
  auto region = in.getRegion();
  auto node = in.getNode();
  if (region.size() > kMaxName || node.size() > kMaxName) return false;
  out = {copy(region), copy(node)};
  return true;
}

void write(const crdt::Member& member, schema::Member::Builder out) {
  out.setRegion(text(member.region));
  out.setNode(text(member.node));
}

bool encode(const crdt::Delta& delta, schema::Delta::Builder out, std::string& error) {
  const CellsOut::Size size = CellsOut::size_of(delta);
  if (size.cells > crdt::kMaxDeltaCells) return fail(error, "too many cells in a delta");
  if (size.slots > crdt::kMaxDeltaSlots) return fail(error, "too many slots in a delta");
  WriterTable writers(delta);
  if (writers.ids().size() > kMaxDeltaWriters) return fail(error, "too many writers");
  CellsOut cells(out, size, writers);
  for (std::size_t i = 0; i < delta.cells.size(); ++i) {
    if (!crdt::valid(delta.cells[i])) return fail(error, at("cell", i) + " is not valid");
    cells.add(delta.cells[i]);
  }
  return encode_writers(delta, writers, out, error);
}

bool decode(schema::Delta::Reader in, crdt::Delta& out, std::string& error) {
  return guarded(error, [&] {
    out = {};
    std::vector<crdt::Incarnation> writers;
    if (!decode_writers(in, writers, out.members, error)) return false;
    CellsIn cells(in);
    if (!cells.check(error)) return false;
    out.cells.resize(cells.size());
    for (crdt::Cell& cell : out.cells) {
      if (!cells.next(writers, cell, error)) return false;
    }
    return cells.done(error);
  });
}

bool encode(const crdt::Message& message, schema::Message::Builder out, std::string& error) {
  struct Visitor {
    schema::Message::Builder out;
    std::string& error;
    bool operator()(const crdt::Push& m) { return encode_as(m, out.initPush(), error); }
    bool operator()(const crdt::Ack& m) { return encode_as(m, out.initAck(), error); }
    bool operator()(const crdt::DigestOffer& m) {
      return encode_as(m, out.initDigestOffer(), error);
    }
    bool operator()(const crdt::Inventory& m) { return encode_as(m, out.initInventory(), error); }
    bool operator()(const crdt::Repair& m) { return encode_as(m, out.initRepair(), error); }
    bool operator()(const crdt::RightsRequest& m) {
      return encode_as(m, out.initRightsRequest(), error);
    }
    bool operator()(const crdt::RejoinRequest& m) {
      return encode_as(m, out.initRejoinRequest(), error);
    }
    bool operator()(const crdt::RejoinConfirmation& m) {
      return encode_as(m, out.initRejoinConfirmation(), error);
    }
  };
  return std::visit(Visitor{out, error}, message);
}

bool decode(schema::Message::Reader in, crdt::Message& out, std::string& error) {
  return guarded(error, [&] {
    switch (in.which()) {
      case schema::Message::PUSH:
        return decode_as(in.getPush(), out.emplace<crdt::Push>(), error);
      case schema::Message::ACK:
        return decode_as(in.getAck(), out.emplace<crdt::Ack>(), error);
      case schema::Message::DIGEST_OFFER:
        return decode_as(in.getDigestOffer(), out.emplace<crdt::DigestOffer>(), error);
      case schema::Message::INVENTORY:
        return decode_as(in.getInventory(), out.emplace<crdt::Inventory>(), error);
      case schema::Message::REPAIR:
        return decode_as(in.getRepair(), out.emplace<crdt::Repair>(), error);
      case schema::Message::RIGHTS_REQUEST:
        return decode_as(in.getRightsRequest(), out.emplace<crdt::RightsRequest>(), error);
      case schema::Message::REJOIN_REQUEST:
        return decode_as(in.getRejoinRequest(), out.emplace<crdt::RejoinRequest>(), error);
      case schema::Message::REJOIN_CONFIRMATION:
        return decode_as(in.getRejoinConfirmation(), out.emplace<crdt::RejoinConfirmation>(),
                         error);
    }
    return fail(error, "a kind of message that this version does not know");
  });
}

std::size_t encoded_size(const crdt::Message& message) {
  struct Visitor {
    static std::size_t of(const crdt::Delta& delta) {
      std::size_t bytes = 512;
      for (const auto& cell : delta.cells) {
        bytes += 36 + cell.slots.size() * 40 + (cell.id.is_bucket() ? 48 : 0);
      }
      for (const auto& [id, member] : delta.members) {
        bytes += 24 + 48 + member.region.size() + member.node.size();
      }
      return bytes;
    }
    std::size_t operator()(const crdt::Push& m) { return 128 + of(m.delta); }
    std::size_t operator()(const crdt::Ack&) { return 128; }
    std::size_t operator()(const crdt::RightsRequest&) { return 128; }
    std::size_t operator()(const crdt::RejoinRequest&) { return 128; }
    std::size_t operator()(const crdt::RejoinConfirmation&) { return 128; }
    std::size_t operator()(const crdt::DigestOffer& m) { return 256 + m.groups.size() * 19; }
    std::size_t operator()(const crdt::Inventory& m) {
      std::size_t bytes = 256;
      for (const auto& group : m.groups) bytes += 31 + group.cells.size() * 16;
      return bytes;
    }
    std::size_t operator()(const crdt::Repair& m) {
      std::size_t bytes = 256 + of(m.delta);
      for (const auto& want : m.wants) bytes += 15 + want.keys.size() * 8;
      return bytes;
    }
  };
  return std::visit(Visitor{}, message);
}

bool encode_bytes(const crdt::Message& message, std::vector<std::byte>& out, std::string& error) {
  capnp::MallocMessageBuilder builder(count(encoded_size(message) / sizeof(capnp::word) + 1));
  if (!encode(message, builder.initRoot<schema::Message>(), error)) return false;
  kj::Array<capnp::word> flat = capnp::messageToFlatArray(builder);
  auto bytes = flat.asBytes();
  auto* begin = reinterpret_cast<const std::byte*>(bytes.begin());
  out.insert(out.end(), begin, begin + bytes.size());
  return true;
}

bool decode_bytes(std::span<const std::byte> bytes, crdt::Message& out, std::string& error) {
  return guarded(error, [&] {
    // A copy, because a message must start at a word's boundary.
    auto words = kj::heapArray<capnp::word>(bytes.size() / sizeof(capnp::word));
    if (words.size() > 0) std::memcpy(words.begin(), bytes.data(), words.asBytes().size());
    if (words.size() == 0) return fail(error, "empty");
    capnp::FlatArrayMessageReader reader(words, capnp::ReaderOptions{1u << 20, 32});
    return decode(reader.getRoot<schema::Message>(), out, error);
  });
}

Error decode_error(schema::ErrorKind kind, capnp::Text::Reader detail) {
  constexpr auto kMost = static_cast<std::uint16_t>(ErrorKind::unsupported);
  const auto number = static_cast<std::uint16_t>(kind);
  const bool unclear = number > kMost || (number == 0 && detail.size() > 0);
  return {unclear ? ErrorKind::unknown : static_cast<ErrorKind>(number), copy(detail)};
}

schema::ErrorKind encode_kind(ErrorKind kind) {
  return static_cast<schema::ErrorKind>(kind);
}

void encode(const Reply& reply, schema::CheckResult::Builder out) {
  if (!reply.error.empty()) {
    out.setError(text(reply.error.detail));
    out.setErrorKind(encode_kind(reply.error.kind));
    return;
  }
  out.setAllowed(reply.allowed);
  out.setDeciding(reply.deciding);
  out.setRepeated(reply.repeated);
  auto statuses = out.initStatuses(count(reply.statuses.size()));
  for (std::size_t i = 0; i < reply.statuses.size(); ++i) {
    const Status& status = reply.statuses[i];
    auto to = statuses[count(i)];
    to.setRule(text(status.rule));
    to.setLimit(status.limit);
    to.setRemaining(status.remaining);
    to.setResetNs(status.reset);
    to.setRetryAfterNs(status.retry_after == kNever ? -1 : status.retry_after);
    to.setAllowed(status.allowed);
    to.setShadow(status.shadow);
    to.setDegraded(status.degraded);
    to.setExhaustedLocally(status.exhausted_locally);
    to.setDelayNs(status.delay);
    to.setQuota(status.quota);
    to.setWindowNs(status.window);
    to.setDescriptor(status.descriptor);
    if (status.over_admission) {
      constexpr auto kMost = std::numeric_limits<std::int64_t>::max();
      to.setOverAdmission(static_cast<std::int64_t>(
          std::min<std::uint64_t>(*status.over_admission, std::uint64_t{kMost})));
    }
  }
}

bool decode(schema::CheckResult::Reader in, Reply& out) {
  out = {};
  out.error = decode_error(in.getErrorKind(), in.getError());
  if (!out.error.empty()) return true;
  out.allowed = in.getAllowed();
  out.deciding = in.getDeciding();
  out.repeated = in.getRepeated();
  auto statuses = in.getStatuses();
  if (statuses.size() > kMaxStatuses) return false;
  if (out.deciding < -1 || out.deciding >= static_cast<int>(statuses.size())) return false;
  out.statuses.resize(statuses.size());
  for (std::size_t i = 0; i < out.statuses.size(); ++i) {
    auto from = statuses[count(i)];
    Status& status = out.statuses[i];
    status.rule = copy(from.getRule());
    status.limit = from.getLimit();
    status.remaining = from.getRemaining();
    status.reset = from.getResetNs();
    status.retry_after = from.getRetryAfterNs() < 0 ? kNever : from.getRetryAfterNs();
    status.allowed = from.getAllowed();
    status.shadow = from.getShadow();
    status.degraded = from.getDegraded();
    status.exhausted_locally = from.getExhaustedLocally();
    status.delay = std::max<Nanos>(from.getDelayNs(), 0);
    status.quota = from.getQuota();
    status.window = std::max<Nanos>(from.getWindowNs(), 0);
    status.descriptor = from.getDescriptor();
    if (from.getOverAdmission() >= 0) {
      status.over_admission = static_cast<std::uint64_t>(from.getOverAdmission());
    }
  }
  return true;
}

}  // namespace weir::rpc
