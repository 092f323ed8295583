#include <weir/proptests/sim/disk.h>

#include <algorithm>
#include <string>
#include <utility>

#include <fmt/format.h>

#include <weir/proptests/sim/checker.h>

namespace weir::sim {
namespace {

constexpr Nanos kMaxSkew = kSecond;  // of every node, see ReplicaOptions
constexpr Nanos kLongestCommit = 4 * kSecond;

bool over(const crdt::Cell& cell, Nanos floor) {
  return cell.id.is_bucket() ? cell.bucket.expiry <= floor
                             : crdt::generation_of(cell.id.epoch).end() <= floor;
}

/// The cells that are not over at `floor`, in the order of their ids.
crdt::Delta live(crdt::Delta delta, Nanos floor) {
  std::erase_if(delta.cells, [&](const crdt::Cell& cell) { return over(cell, floor); });
  std::sort(delta.cells.begin(), delta.cells.end(),
            [](const crdt::Cell& a, const crdt::Cell& b) { return a.id < b.id; });
  std::map<crdt::Incarnation, crdt::Member> used;
  for (const crdt::Cell& cell : delta.cells) {
    for (const crdt::Slot& slot : cell.slots) {
      auto at = delta.members.find(slot.id.writer);
      if (at != delta.members.end()) used.insert(*at);
    }
  }
  delta.members = std::move(used);
  return delta;
}

/// What of `held`, the live part of `image`, a real store lacks or has otherwise; both sorted.
std::string difference(const Image& image, const crdt::Delta& held, const crdt::Delta& real,
                       Nanos floor) {
  std::map<crdt::CellId, const crdt::Cell*> found;
  for (const crdt::Cell& cell : real.cells) found.emplace(cell.id, &cell);
  std::size_t windows = 0;
  for (const crdt::Cell& cell : held.cells) {
    auto at = found.find(cell.id);
    if (!cell.id.is_bucket()) {
      ++windows;
      if (at == found.end() || *at->second != cell) return crdt::to_string(cell.id.series);
      continue;
    }
    for (const crdt::Slot& slot : cell.slots) {
      if (image.slot_expiry.at({cell.id, slot.id}) <= floor) continue;
      std::uint64_t value = at == found.end() ? 0 : at->second->value_of(slot.id);
      if (value >= slot.value) continue;  // more: of before the image forgot it
      return fmt::format(
          "bucket {}: {} of {} in the slot of {}, full again {:+.6f}s from its floor",
          crdt::to_string(cell.id.series), value, slot.value, crdt::to_string(slot.id.writer),
          static_cast<double>(image.slot_expiry.at({cell.id, slot.id}) - floor) / 1e9);
    }
  }
  for (const crdt::Cell& cell : real.cells) windows -= cell.id.is_bucket() ? 0 : 1;
  return windows == 0 ? "" : "a window that was never committed";
}

}  // namespace

void Image::take_in(const crdt::Delta& delta) {
  for (const crdt::Cell& cell : delta.cells) {
    auto [at, fresh] = cells.try_emplace(cell.id, cell);
    if (!fresh) crdt::join(at->second, cell);
    if (!cell.id.is_bucket()) continue;
    for (const crdt::Slot& slot : cell.slots) {
      Nanos& expiry = slot_expiry[{cell.id, slot.id}];
      expiry = std::max(expiry, cell.bucket.expiry);
    }
  }
  for (const auto& member : delta.members) members.insert(member);
}

std::uint64_t Image::value_of(const crdt::CellId& cell, const crdt::SlotId& slot) const {
  auto at = cells.find(cell);
  return at == cells.end() ? 0 : at->second.value_of(slot);
}

storage::Recovered Image::recovered() const {
  storage::Recovered out;
  for (const auto& [id, cell] : cells) out.state.cells.push_back(cell);
  out.state.members = members;
  out.time_floor = ceiling;
  out.lost = lost;
  out.incarnations = incarnations;
  out.clean = clean;
  return out;
}

bool SimStore::open(const crdt::Incarnation& fresh, Nanos now, storage::StoreEvents events,
                    storage::Recovered& out, std::string& error) {
  events_ = std::move(events);
  return attach(fresh, now, out, error);
}

bool SimStore::attach(const crdt::Incarnation& fresh, Nanos now, storage::Recovered& out,
                      std::string& error) {
  if (disk_.full) {
    error = "simulated disk: no space";
    return false;
  }
  Image& image = disk_.image;
  bool used = std::find(image.incarnations.begin(), image.incarnations.end(), fresh) !=
              image.incarnations.end();
  if (used && host_.sabotage != Sabotage::reused_incarnation) {
    error = "simulated disk: incarnation used before";
    return false;
  }
  out = image.recovered();
  const Nanos latest = std::max(out.time_floor, now);
  image.lived = storage::TimeLived(image.lived_kept, out.time_floor);
  image.lived.take_set_back(now, kMaxSkew, out);
  if (out.set_back > 0) image.lived_kept = image.lived.ranges();
  if (disk_.backing) {
    storage::Recovered real;
    disk_.backing->crash();  // what is left of an earlier one
    if (!disk_.backing->open(fresh, now, real, error)) return false;
    // When the real store forgets what is over is its own affair.
    Nanos floor = latest - kMaxSkew;
    real.state = live(std::move(real.state), floor);
    crdt::Delta held = live(out.state, floor);
    std::string missing = difference(image, held, real.state, floor);
    if (!missing.empty()) throw Violation{28, "the real store does not hold it: " + missing};
    if (real.time_floor != out.time_floor || real.lost != out.lost || real.clean != out.clean) {
      throw Violation{11, "the real store lost the time floor or the manner of the last stop"};
    }
    // Of a bucket that was reset the real store may still have what had drained, or not: that
    // hangs on its own pace, so the node is given what both have.
    real.state.cells = std::move(held.cells);
    out = std::move(real);
  }
  image.incarnations.push_back(fresh);
  image.clean = false;
  image.ceiling = std::max(out.time_floor, now);
  image.reached(image.ceiling);
  image.lost = out.lost;
  if (host_.sabotage == Sabotage::lost_clock) out.time_floor = 0;
  if (host_.sabotage == Sabotage::counted_twice) {
    for (crdt::Cell& cell : out.state.cells) {
      if (!cell.id.is_bucket()) cell.raise({fresh, 0}, cell.total());
    }
  }
  ceiling_wanted_ = batch_ceiling_ = image.ceiling;
  ++opened_;
  return true;
}

void SimStore::reopen(const crdt::Incarnation& fresh, Nanos now) {
  failed_ = true;
  queue_.clear();
  batch_.clear();
  host_.after(host_.random->between(1, 20) * kMillisecond, [this, fresh, now] {
    auto out = std::make_shared<storage::Recovered>();
    std::string error = "simulated disk: cannot write";
    if (disk_.failing || !attach(fresh, now, *out, error)) {
      events_.failed(error);
      return;
    }
    busy_ = failed_ = false;
    events_.opened(std::move(out));
  });
}

bool SimStore::adopt(const crdt::Incarnation& fresh, Nanos now, std::string& error) {
  Image& image = disk_.image;
  if (failed_ || disk_.failing || disk_.full) {
    error = "simulated disk: cannot write";
    return false;
  }
  if (std::find(image.incarnations.begin(), image.incarnations.end(), fresh) !=
      image.incarnations.end()) {
    error = "simulated disk: incarnation used before";
    return false;
  }
  if (disk_.backing && !disk_.backing->adopt(fresh, now, error)) return false;
  image.incarnations.push_back(fresh);
  return true;
}

void SimStore::append(crdt::Write write) {
  if (failed_) return;
  queue_.push_back(std::move(write));
  begin();
}

void SimStore::expire(Nanos floor) {
  if (failed_) return;
  expire_wanted_ = std::max(expire_wanted_, floor);
}

void SimStore::reserve_time(Nanos ceiling) {
  if (failed_) return;
  ceiling_wanted_ = std::max(ceiling_wanted_, ceiling);
  begin();
}

void SimStore::begin() {
  if (busy_ || failed_) return;
  if (queue_.empty() && ceiling_wanted_ <= batch_ceiling_) return;
  busy_ = true;
  // A group forms while the thread wakes up.
  host_.after(host_.random->between(5, 50) * kMicrosecond, [this, opened = opened_] {
    if (opened != opened_) return;
    batch_ = std::exchange(queue_, {});
    batch_ceiling_ = ceiling_wanted_;
    // What was asked for before this batch is settled once the batch is.
    expire_settling_ = expire_wanted_;
    Nanos takes = host_.latency / 2 + host_.random->between(0, host_.latency);
    host_.after(std::min(takes * disk_.slowness, kLongestCommit), [this, opened] {
      if (opened == opened_) finish();
    });
  });
}

void SimStore::hold(std::vector<crdt::Write> writes, Nanos ceiling) {
  if (host_.sabotage == Sabotage::forgetful_store) {
    std::erase_if(writes, [&](const crdt::Write&) { return host_.random->chance(100); });
  }
  if (disk_.backing) disk_.backing->commit(writes, ceiling);
  for (const crdt::Write& write : writes) {
    disk_.image.take_in(write.delta);
    host_.durable(write);
    counters_.records += write.delta.cells.size();
  }
  if (ceiling > disk_.image.ceiling) {
    disk_.image.ceiling = ceiling;
    disk_.image.reached(ceiling);
  }
  ++counters_.commits;
}

void SimStore::finish() {
  crdt::WriteId upto = batch_.empty() ? 0 : batch_.back().id;
  if (disk_.failing || disk_.full) {
    if (host_.sabotage == Sabotage::ignored_sync_error) {
      batch_.clear();
      busy_ = false;
      if (upto != 0) events_.committed(upto);
      begin();
      return;
    }
    bool written = !disk_.full && host_.random->chance(500);
    if (disk_.backing) disk_.backing->fail(batch_, batch_ceiling_, written);
    if (written) {
      disk_.image.ceiling = std::max(disk_.image.ceiling, batch_ceiling_);
      for (const crdt::Write& write : batch_) {
        disk_.image.take_in(write.delta);
        host_.durable(write);
      }
    }
    fail(disk_.full ? "simulated disk: no space" : "simulated disk: sync failed");
    return;
  }
  if (host_.sabotage == Sabotage::lying_store) std::swap(batch_, cached_);
  hold(std::exchange(batch_, {}), batch_ceiling_);
  drop_expired();
  if (host_.dies_after_commit()) return;
  busy_ = false;
  events_.reserved(batch_ceiling_);
  if (upto != 0) events_.committed(upto);
  begin();
}

void SimStore::drop_expired() {
  expired_ = std::max(expired_, expire_settling_);
  if (disk_.backing) disk_.backing->expire(expired_);
  std::erase_if(disk_.image.cells, [&](const auto& held) { return over(held.second, expired_); });
}

void SimStore::fail(const std::string& reason) {
  failed_ = true;
  queue_.clear();
  batch_.clear();
  events_.failed(reason);
}

void SimStore::crash() {
  if (failed_) {
    if (disk_.backing) disk_.backing->crash();
    return;
  }
  std::vector<crdt::Write> kept;
  if (!disk_.failing && !disk_.full && !batch_.empty()) {
    switch (host_.random->below(3)) {
      case 0:
        break;
      case 1:
        kept = std::move(batch_);
        break;
      default:
        if (host_.reorders) {
          for (crdt::Write& write : batch_) {
            if (host_.random->chance(500)) kept.push_back(std::move(write));
          }
        } else {
          auto length = static_cast<std::ptrdiff_t>(host_.random->below(batch_.size() + 1));
          kept.assign(batch_.begin(), batch_.begin() + length);
        }
    }
  }
  // As in a real one, no write is there before the time that was asked for when it came.
  if (!kept.empty()) hold(std::move(kept), batch_ceiling_);
  if (disk_.backing) disk_.backing->crash();
}

void SimStore::close(Nanos now) {
  if (failed_) return;
  if (disk_.failing || disk_.full) {
    if (disk_.backing) disk_.backing->crash();
    fail("simulated disk: sync failed at the end");
    return;
  }
  std::vector<crdt::Write> all = std::move(cached_);
  for (auto* part : {&batch_, &queue_}) {
    for (crdt::Write& write : *part) all.push_back(std::move(write));
    part->clear();
  }
  if (host_.sabotage == Sabotage::leaky_stop) all.clear();
  hold(std::move(all), 0);
  // As the real one does: an earlier boot may have gone further than this one.
  disk_.image.ceiling = now;
  disk_.image.clean = true;
  if (disk_.backing) disk_.backing->close(now);
}

}  // namespace weir::sim
