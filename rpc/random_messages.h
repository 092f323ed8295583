#pragma once

#include <algorithm>
#include <random>
#include <set>
#include <string>

#include <weir/crdt/message.h>

namespace weir::rpc::test {

/// Random well-formed messages, for tests.
class RandomMessages {
 public:
  explicit RandomMessages(std::uint64_t seed) : random_(seed) {}

  crdt::Message next() {
    switch (below(8)) {
      case 0:
        return crdt::Push{incarnation(), word(), word(), below(2) == 0, delta()};
      case 1:
        return crdt::Ack{incarnation(), incarnation(), word()};
      case 2: {
        crdt::DigestOffer out{time(), word(), {}};
        for (auto n = below(40); n > 0; --n) out.groups.push_back({group(), word()});
        return out;
      }
      case 3: {
        crdt::Inventory out{word(), below(2) == 0, {}};
        for (auto n = below(10); n > 0; --n) {
          crdt::GroupInventory inventory{group(), word(), word(), {}};
          for (auto cells = below(20); cells > 0; --cells) {
            inventory.cells.push_back({word(), word()});
          }
          out.groups.push_back(std::move(inventory));
        }
        return out;
      }
      case 4:
        return crdt::RightsRequest{{word(), word()}, {{word(), word()}, epoch()}, word()};
      case 5:
        return crdt::RejoinRequest{incarnation(), time(), word()};
      case 6:
        return crdt::RejoinConfirmation{incarnation(), time(), time(), word()};
      default: {
        crdt::Repair out{delta(), {}};
        for (auto n = below(10); n > 0; --n) {
          crdt::GroupWant want{group(), {}};
          for (auto keys = below(20); keys > 0; --keys) want.keys.push_back(word());
          out.wants.push_back(std::move(want));
        }
        return out;
      }
    }
  }

  crdt::Delta delta() {
    std::vector<crdt::Incarnation> writers;
    for (auto n = 1 + below(5); n > 0; --n) writers.push_back(incarnation());
    crdt::Delta out;
    for (auto n = below(30); n > 0; --n) {
      crdt::Cell cell;
      cell.id.series = {word(), word()};
      bool bucket = below(3) == 0;
      if (!bucket) {
        cell.id.epoch.start = time();
        cell.id.epoch.expiry = cell.id.epoch.start + 1 + static_cast<Nanos>(below(kDay));
      }
      std::set<crdt::SlotId> ids;
      for (auto slots = below(6); slots > 0; --slots) {
        // What was given back, and rows of an escrow rule, besides plain counts.
        const std::uint64_t rows[] = {1, crdt::kBackRow, word() | 1ull << 63};
        std::uint64_t row = below(4) != 0 ? 0 : rows[below(3)];
        ids.insert({writers[below(writers.size())], bucket ? below(4) : row});
      }
      for (const auto& id : ids) cell.slots.push_back({id, 1 + below(1'000'000)});
      if (bucket) {
        cell.bucket.checkpoint.counted = below(cell.total() + 1);
        if (cell.bucket.checkpoint.counted != 0) {
          cell.bucket.checkpoint.at = time();
          cell.bucket.checkpoint.debt = static_cast<crdt::DebtTicks>(word()) << 64 | word();
        }
        cell.bucket.touched = time();
        cell.bucket.expiry = cell.bucket.touched + static_cast<Nanos>(below(kDay));
      }
      out.cells.push_back(std::move(cell));
    }
    for (const auto& writer : writers) {
      if (below(2) == 0) out.members[writer] = {name(), name()};
    }
    if (below(3) == 0) out.members[incarnation()] = {name(), name()};
    return out;
  }

  std::uint64_t word() { return below(4) == 0 ? below(3) : random_(); }
  std::uint64_t below(std::uint64_t n) { return random_() % n; }

 private:
  crdt::Incarnation incarnation() { return {random_(), random_() | 1}; }
  Nanos time() { return static_cast<Nanos>(below(static_cast<std::uint64_t>(kMaxTime) + 1)); }
  crdt::Epoch epoch() {
    Nanos start = time();
    return {start, start + 1 + static_cast<Nanos>(below(kDay))};
  }
  crdt::Group group() {
    crdt::Generation generation;
    if (below(3) != 0) {
      crdt::Epoch epoch{time(), 0};
      epoch.expiry = epoch.start + 1 + static_cast<Nanos>(below(30 * kDay));
      generation = crdt::generation_of(epoch);
    }
    return {generation, static_cast<std::uint32_t>(below(1u << crdt::kShardBits))};
  }
  std::string name() {
    std::string out;
    for (auto n = below(12); n > 0; --n) out += static_cast<char>('a' + below(26));
    return out;
  }

  std::mt19937_64 random_;
};

}  // namespace weir::rpc::test
