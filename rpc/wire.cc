#include <weir/rpc/wire.h>

#include <capnp/message.h>
#include <capnp/serialize.h>
#include <kj/exception.h>

#include <algorithm>
#include <cstring>
#include <limits>
#include <set>
#include <string_view>
#include <utility>

#include <weir/crdt/codec.h>

namespace weir::rpc {
namespace {

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

// ---- Deltas ----

constexpr crdt::DeltaBounds kBounds{.cells = crdt::kMaxDeltaCells,
                                    .slots = crdt::kMaxDeltaSlots,
                                    .writers = kMaxDeltaWriters,
                                    .members = kMaxDeltaMembers};

/// What decode_delta() would refuse is not sent.
bool sendable(const crdt::Delta& delta, std::string& error) {
  if (delta.cells.size() > kBounds.cells) return fail(error, "too many cells in a delta");
  std::size_t slots = 0;
  for (std::size_t i = 0; i < delta.cells.size(); ++i) {
    slots += delta.cells[i].slots.size();
    if (!crdt::valid(delta.cells[i])) return fail(error, at("cell", i) + " is not valid");
  }
  if (slots > kBounds.slots) return fail(error, "too many slots in a delta");
  if (delta.members.size() > kBounds.writers - kBounds.slots) {
    return fail(error, "too many writers in a delta");
  }
  std::set<crdt::Member> members;
  for (const auto& [id, member] : delta.members) {
    if (!id) return fail(error, "a member's incarnation is zero");
    if (member.region.size() > kMaxName || member.node.size() > kMaxName) {
      return fail(error, "a member has a long name");
    }
    members.insert(member);
  }
  return members.size() <= kBounds.members || fail(error, "too many members in a delta");
}

template <typename Out>
bool encode_delta(const crdt::Delta& delta, Out out, std::string& error) {
  if (!sendable(delta, error)) return false;
  std::vector<std::byte> bytes;
  crdt::encode(delta, bytes);
  out.setDelta(kj::arrayPtr(reinterpret_cast<const kj::byte*>(bytes.data()), bytes.size()));
  return true;
}

bool decode_delta(capnp::Data::Reader in, crdt::Delta& out, std::string& error) {
  return crdt::decode({reinterpret_cast<const std::byte*>(in.begin()), in.size()}, kBounds, out,
                      error);
}

// ---- The messages ----

bool encode_as(const crdt::Push& in, schema::Push::Builder out, std::string& error) {
  write(in.pusher, out.initPusher());
  out.setAfter(in.after);
  out.setUpto(in.upto);
  out.setBase(in.base);
  return encode_delta(in.delta, out, error);
}

bool decode_as(schema::Push::Reader in, crdt::Push& out, std::string& error) {
  out.pusher = read(in.getPusher());
  out.after = in.getAfter();
  out.upto = in.getUpto();
  out.base = in.getBase();
  return decode_delta(in.getDelta(), out.delta, error);
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
  if (!encode_delta(in.delta, out, error)) return false;
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
  return decode_delta(in.getDelta(), out.delta, error);
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
      std::size_t bytes = 64;
      for (const auto& cell : delta.cells) {
        bytes += 44 + cell.slots.size() * 40 + (cell.id.is_bucket() ? 48 : 0);
      }
      for (const auto& [id, member] : delta.members) {
        bytes += 24 + member.region.size() + member.node.size();
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
  constexpr auto kMost = static_cast<std::uint16_t>(ErrorKind::forbidden);
  const auto number = static_cast<std::uint16_t>(kind);
  const bool unclear = number > kMost || (number == 0 && detail.size() > 0);
  return {unclear ? ErrorKind::unknown : static_cast<ErrorKind>(number), copy(detail)};
}

schema::ErrorKind encode_kind(ErrorKind kind) {
  return static_cast<schema::ErrorKind>(kind);
}

schema::RequestKind encode_kind(RequestKind kind) {
  return static_cast<schema::RequestKind>(kind);
}

std::optional<RequestKind> decode_kind(schema::RequestKind kind) {
  const auto number = static_cast<std::uint16_t>(kind);
  constexpr auto kMost = static_cast<std::uint16_t>(RequestKind::refund);
  if (number > kMost) return std::nullopt;
  return static_cast<RequestKind>(number);
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
  out.setGivenBack(reply.given_back);
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
    to.setHidden(status.hidden);
    to.setDenyStatus(status.deny_status);
    if (!status.deny_message.empty()) to.setDenyMessage(text(status.deny_message));
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
  out.given_back = in.getGivenBack();
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
    status.hidden = from.getHidden();
    const std::uint16_t deny = from.getDenyStatus();
    status.deny_status = deny == 403 || deny == 503 ? deny : kDenyStatus;
    const auto message = from.getDenyMessage();
    if (message.size() <= kMaxDenyMessage) status.deny_message = copy(message);
    if (from.getOverAdmission() >= 0) {
      status.over_admission = static_cast<std::uint64_t>(from.getOverAdmission());
    }
  }
  return true;
}

}  // namespace weir::rpc
