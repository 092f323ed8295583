#include <weir/crdt/cell_store.h>
#include <weir/crdt/codec.h>

#include "law.h"
#include "schedules.h"

namespace weir::laws {
namespace {

using crdt::Cell;

Cell joined(Cell a, const Cell& b) {
  crdt::join(a, b);
  return a;
}

bool tie(const Cell& a, const Cell& b) {
  const crdt::Checkpoint& x = a.bucket.checkpoint;
  const crdt::Checkpoint& y = b.bucket.checkpoint;
  return a.id.is_bucket() && x.counted == y.counted && !(x == y);
}

LAW(1, "join is commutative, associative and idempotent, with the empty state as bottom",
    "windowed", "bucket", "checkpoints that tie", "checkpoints that differ only in debt",
    "a thousand slots", "a total that saturates", "an empty cell") {
  crdt::CellId id = *cell_ids();
  Cell a = *cells_of(id).as("a");
  Cell b = *rivals_of(a).as("b");
  Cell c = *rivals_of(b).as("c");
  Cell bottom;
  bottom.id = id;
  reached("windowed", !id.is_bucket());
  reached("bucket", id.is_bucket());
  reached("checkpoints that tie", tie(a, b) || tie(b, c) || tie(a, c));
  reached("checkpoints that differ only in debt",
          tie(a, b) && a.bucket.checkpoint.at == b.bucket.checkpoint.at);
  reached("a thousand slots", a.slots.size() >= 1000);
  reached("a total that saturates", joined(a, b).total() == kMax);
  reached("an empty cell", a.slots.empty());

  RC_ASSERT(joined(a, b) == joined(b, a));
  RC_ASSERT(joined(joined(a, b), c) == joined(a, joined(b, c)));
  RC_ASSERT(joined(a, a) == a);
  RC_ASSERT(joined(joined(a, b), b) == joined(a, b));
  RC_ASSERT(joined(a, bottom) == a);
  RC_ASSERT(joined(bottom, a) == a);
  RC_ASSERT(crdt::valid(joined(a, b)));
  // It says whether anything changed.
  Cell into = a;
  bool changed = crdt::join(into, b);
  RC_ASSERT(changed == !(into == a));
}

LAW(1, "of two checkpoints the one that counted more wins, then the earlier, then the smaller debt",
    "counted differs", "only the instant differs", "only the debt differs", "equal") {
  Cell a = *cells_of(*bucket_ids()).as("a");
  Cell b = *rivals_of(a).as("b");
  const crdt::Checkpoint& x = a.bucket.checkpoint;
  const crdt::Checkpoint& y = b.bucket.checkpoint;
  bool first = x.counted > y.counted ||
               (x.counted == y.counted && (x.at < y.at || (x.at == y.at && x.debt <= y.debt)));
  RC_ASSERT(joined(a, b).bucket.checkpoint == (first ? x : y));
  RC_ASSERT(joined(b, a).bucket.checkpoint == (first ? x : y));
  reached("counted differs", x.counted != y.counted);
  reached("only the instant differs", x.counted == y.counted && x.at != y.at);
  reached("only the debt differs", x.counted == y.counted && x.at == y.at && x.debt != y.debt);
  reached("equal", x == y);
}

LAW(2, "an increment strictly inflates its own slot alone", "a new slot", "a slot that is there",
    "an increment of nothing", "a value below the slot's", "a slot at its end") {
  Cell before = *cells().as("before");
  crdt::SlotId slot = *slot_ids(before.id.is_bucket()).as("slot");
  std::uint64_t held = before.value_of(slot);
  bool lower = *chance(20);
  std::uint64_t value = lower ? held / 2 : add_saturated(held, *counts().as("units"));
  reached("a new slot", held == 0 && value > 0);
  reached("a slot that is there", held > 0 && value > held);
  reached("an increment of nothing", value == held);
  reached("a value below the slot's", value < held);
  reached("a slot at its end", value == kMax);

  Cell after = before;
  RC_ASSERT(after.raise(slot, value) == (value > held));
  RC_ASSERT(after.value_of(slot) == std::max(value, held));
  for (const crdt::Slot& other : before.slots) {
    if (other.id != slot) RC_ASSERT(after.value_of(other.id) == other.value);
  }
  RC_ASSERT(after.slots.size() == before.slots.size() + (held == 0 && value > 0));
  RC_ASSERT(after.bucket == before.bucket);
  RC_ASSERT(crdt::valid(after));
  RC_ASSERT(joined(before, after) == after);
}

LAW(3, "the value is the sum of the slots, saturated, and only grows", "a total that saturates",
    "a total that does not", "a growth") {
  crdt::CellId id = *cell_ids();
  Cell cell;
  cell.id = id;
  std::uint64_t last = 0;
  for (const Cell& next :
       *rc::gen::container<std::vector<Cell>>(cells_of(id)).as("joined in turn")) {
    crdt::join(cell, next);
    Uint128 sum = 0;
    for (const crdt::Slot& slot : cell.slots) sum += slot.value;
    RC_ASSERT(cell.total() == static_cast<std::uint64_t>(std::min<Uint128>(sum, kMax)));
    RC_ASSERT(cell.total() >= last);
    reached("a total that saturates", sum > kMax);
    reached("a total that does not", sum > 0 && sum <= kMax);
    reached("a growth", last > 0 && cell.total() > last);
    last = cell.total();
  }
}

LAW(4, "decoding an encoding gives the same state", "nothing", "buckets", "a thousand slots",
    "writers without a name", "a value at its end") {
  crdt::Delta delta = *deltas().as("delta");
  std::vector<std::byte> bytes;
  crdt::encode(delta, bytes);
  crdt::Delta back;
  std::string error;
  RC_ASSERT(crdt::decode(bytes, back, error));
  RC_ASSERT(back == delta);
  // No part of an encoding passes for a whole one.
  std::size_t some = *between<std::size_t>(0, bytes.size() - 1).as("cut at");
  RC_ASSERT(!crdt::decode(std::span(bytes).first(some), back, error));
  reached("nothing", delta.empty());
  for (const Cell& cell : delta.cells) {
    reached("buckets", cell.id.is_bucket());
    reached("a thousand slots", cell.slots.size() >= 1000);
    for (const crdt::Slot& slot : cell.slots) {
      reached("writers without a name", !delta.members.contains(slot.id.writer));
      reached("a value at its end", slot.value == kMax);
    }
  }
}

/// Of few windows and writers, and with rows of escrow rules: neighbours in a delta often have some
/// of these in common.
rc::Gen<Cell> neighbours() {
  return rc::gen::exec([] {
    Cell cell;
    cell.id = *cell_ids();
    const bool bucket = cell.id.is_bucket();
    for (int n = *between(0, 3); n > 0; --n) {
      crdt::SlotId slot{{1, *between<std::uint64_t>(1, 3)}, 0};
      slot.birth = bucket ? *between<std::uint64_t>(0, 2)
                          : *one_of<std::uint64_t>({0, 0, 0, 1, 2, std::uint64_t{1} << 63 | 5});
      cell.raise(slot, *positive_counts());
    }
    if (bucket) cell.bucket = *bucket_states(cell.total());
    if (!crdt::valid(cell)) cell.bucket.checkpoint = {};
    return cell;
  });
}

LAW(4, "an encoding keeps what is a cell's own, whatever cells stand beside it",
    "a row beside a count", "other windows", "a bucket between windows", "cells that are alike",
    "a checkpoint older than the last touch") {
  crdt::Delta delta;
  delta.cells = *rc::gen::container<std::vector<Cell>>(neighbours()).as("cells");
  std::vector<std::byte> bytes;
  crdt::encode(delta, bytes);
  crdt::Delta back;
  std::string error;
  RC_ASSERT(crdt::decode(bytes, back, error));
  RC_ASSERT(back == delta);
  for (std::size_t i = 1; i < delta.cells.size(); ++i) {
    const Cell& a = delta.cells[i - 1];
    const Cell& b = delta.cells[i];
    const bool one = a.slots.size() == 1 && b.slots.size() == 1;
    const bool windows = !a.id.is_bucket() && !b.id.is_bucket();
    const bool same = one && a.slots[0].id.writer == b.slots[0].id.writer;
    reached("a row beside a count",
            windows && same && a.slots[0].id.birth == 0 && b.slots[0].id.birth != 0);
    reached("other windows", windows && a.id.epoch != b.id.epoch);
    reached("a bucket between windows", a.id.is_bucket() != b.id.is_bucket());
    reached("cells that are alike",
            same && a.id.epoch == b.id.epoch && a.slots[0].id.birth == b.slots[0].id.birth);
    reached("a checkpoint older than the last touch", b.bucket.checkpoint.at < b.bucket.touched);
  }
}

LAW(4, "slots of unknown writers survive a relay", "windowed", "buckets", "named writers") {
  // b knows of writers that a never heard of; the two meet over anti-entropy.
  crdt::Delta delta = *deltas().as("held by b");
  std::vector<std::unique_ptr<crdt::Replica>> nodes;
  for (std::uint64_t i = 0; i < 2; ++i) {
    crdt::ReplicaOptions options;
    options.incarnation = {100, i + 1};
    options.peers = {{"other", "n"}};
    nodes.push_back(std::make_unique<crdt::Replica>(options, true));
  }
  nodes[1]->restore(delta, kStart);
  for (std::size_t i = 0; i < 2; ++i) nodes[i]->peer_up(0, nodes[1 - i]->incarnation(), kStart);
  for (int round = 0; round < 12; ++round) {
    for (std::size_t i = 0; i < 2; ++i) {
      nodes[i]->tick(kStart);
      for (const crdt::Envelope& envelope : nodes[i]->take().messages) {
        nodes[1 - i]->receive(0, nodes[i]->incarnation(), envelope.message, kStart);
      }
    }
  }
  RC_ASSERT(nodes[0]->cell_count() == delta.cells.size());
  for (const Cell& cell : delta.cells) {
    const std::optional<Cell> there = nodes[0]->find(cell.id);
    RC_ASSERT(there.has_value());
    RC_ASSERT(*there == cell);
    reached("windowed", !cell.id.is_bucket());
    reached("buckets", cell.id.is_bucket());
  }
  for (const auto& [writer, member] : delta.members) {
    reached("named writers");
    RC_ASSERT(nodes[0]->members().contains(writer));
    RC_ASSERT(nodes[0]->members().at(writer) == member);
  }
}

LAW(5,
    "any order, duplication and loss, then full sync, gives equal states and the sequential value",
    "messages lost", "messages repeated", "messages overtaken", "several writers in one cell",
    "sums that saturate", "memory only", "a repair") {
  MeshOptions options = *mesh_options().as("mesh");
  auto schedule = *schedules(options.nodes, {Act::cut, Act::cut_one_way, Act::mend, Act::disconnect,
                                             Act::connect, Act::stall, Act::unstall})
                       .as("schedule");
  Mesh mesh(options);
  play(mesh, schedule);
  RC_ASSERT(mesh.settle());
  assert_agreement(mesh);
  auto state = mesh.state(0);
  RC_ASSERT(state.size() == mesh.counted().size());
  std::uint64_t repaired = 0;
  for (std::size_t i = 0; i < mesh.size(); ++i)
    repaired += mesh.replica(i).counters().repaired_cells;
  for (const auto& [id, units] : mesh.counted()) {
    RC_ASSERT(state.at(id).total() == units);
    reached("several writers in one cell", state.at(id).slots.size() > 1);
    reached("sums that saturate", units == kMax);
  }
  reached("messages lost", mesh.messages_lost() > 0);
  reached("messages repeated", mesh.messages_repeated() > 0);
  reached("messages overtaken", mesh.messages_overtaken() > 0);
  reached("memory only", options.memory_only);
  reached("a repair", repaired > 0);
}

/// The cell, had all its slots been born as a second began.
Cell born_on_seconds(const Cell& cell) {
  Cell out{cell.id, {}, cell.bucket};
  for (const crdt::Slot& slot : cell.slots) {
    crdt::SlotId born = slot.id;
    born.birth -= born.birth % static_cast<std::uint64_t>(kSecond);
    out.raise(born, slot.value);
  }
  out.bucket.checkpoint.counted = std::min(out.bucket.checkpoint.counted, out.total());
  return out;
}

LAW(4, "a held cell is the cell, whatever form it has in memory", "windowed", "bucket",
    "a thousand slots", "a record that moved", "a checkpoint older than the last touch",
    "whole seconds", "births on whole seconds", "an own slot", "an own slot alone") {
  crdt::CellId id = *cell_ids();
  Cell a = *cells_of(id).as("a");
  Cell b = *rivals_of(a).as("b");
  if (id.is_bucket() && *chance(50).as("births on whole seconds")) {
    a = born_on_seconds(a);
    b = born_on_seconds(b);
    reached("births on whole seconds", !a.slots.empty());
  }
  crdt::SlotId own;
  if (id.is_bucket() && !a.slots.empty()) {
    own = a.slots[*between<std::size_t>(0, a.slots.size() - 1).as("own")].id;
  }
  // Often a writer has the first number that has the own slot.
  crdt::CellStore store(1, *chance(50) ? own.writer : crdt::Incarnation{1, 1});
  crdt::RecordRef neighbour = 0;
  store.join(neighbour, {{id.series.hi, ~id.series.lo}, id.epoch}, b.slots, b.bucket);
  crdt::RecordRef ref = 0;
  store.join(ref, id, a.slots, a.bucket, &own);
  std::uint64_t stamp = *between<std::uint64_t>(0, crdt::kMaxStamp).as("stamp");
  store.set_stamp(ref, stamp);
  crdt::RecordRef before = ref;
  Cell expected = joined(a, b);
  RC_ASSERT(store.join(ref, id, b.slots, b.bucket) == !(expected == a));
  crdt::HeldCell held;
  store.read(ref, held);
  RC_ASSERT(held.cell == expected);
  RC_ASSERT(held.own == own);
  RC_ASSERT(store.stamp(ref) == stamp);
  RC_ASSERT(store.id(ref) == id);
  RC_ASSERT(store.find(id) == ref);
  reached("windowed", !id.is_bucket());
  reached("bucket", id.is_bucket());
  reached("a thousand slots", expected.slots.size() >= 1000);
  reached("a record that moved", ref != before);
  reached("a checkpoint older than the last touch",
          expected.bucket.checkpoint.at < expected.bucket.touched);
  reached("whole seconds", !id.is_bucket() && id.epoch.start % kSecond == 0);
  reached("an own slot", own != crdt::SlotId{});
  reached("an own slot alone", own != crdt::SlotId{} && expected.slots.size() == 1);
}

LAW(38, "a group's digest is that of its cells, however they came", "a cell that grew",
    "a bucket that was reset", "a bucket that ended", "several groups") {
  crdt::CellStore store(1);
  std::vector<crdt::CellId> ids = *rc::gen::container<std::vector<crdt::CellId>>(cell_ids());
  if (ids.empty()) return;
  int steps = *between(1, 30).as("steps");
  for (int step = 0; step < steps; ++step) {
    crdt::CellId id = ids[*between<std::size_t>(0, ids.size() - 1)];
    crdt::RecordRef ref = store.find(id);
    if (ref != 0 && id.is_bucket() && *chance(20)) {
      store.clear(ref);
      reached("a bucket that was reset");
    }
    Cell part = *cells_of(id);
    bool held = ref != 0;
    if (store.join(ref, id, part.slots, part.bucket) && held) reached("a cell that grew");
    if (*chance(10)) {
      crdt::RecordRef due = store.take_due_bucket(kNever);
      if (due != 0) store.drop_bucket(due);
      if (due != 0) reached("a bucket that ended");
    }
  }
  std::size_t groups = 0;
  store.for_each_group([&](const crdt::Group& group, std::size_t cells, std::uint64_t digest) {
    std::uint64_t sum = 0;
    store.walk(group, 0, [&](crdt::RecordRef ref, const crdt::CellId&) {
      crdt::HeldCell held;
      store.read(ref, held);
      RC_ASSERT(crdt::group_of(held.cell.id) == group);
      sum += crdt::digest_of(held.cell);
      --cells;
      return true;
    });
    RC_ASSERT(cells == 0u);
    RC_ASSERT(sum == digest);
    ++groups;
  });
  reached("several groups", groups > 1);
}

}  // namespace
}  // namespace weir::laws
