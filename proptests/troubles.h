#pragma once

#include <functional>
#include <string>

#include "law.h"
#include "schedules.h"

namespace weir::laws {

enum class Trouble : std::uint8_t {
  cut,
  cut_one_way,
  mend,
  crash,
  lose_disk,
  copy_disk,
  restore_disk,
  reincarnate,
  stall,
  unstall,
  stop
};

inline void trouble(Mesh& mesh) {
  std::size_t i = *between<std::size_t>(0, mesh.size() - 1);
  std::size_t j = (i + *between<std::size_t>(1, mesh.size() - 1)) % mesh.size();
  auto what = static_cast<Trouble>(*choice(11));
  switch (what) {
    case Trouble::cut:
      return mesh.cut(i, j);
    case Trouble::cut_one_way:
      return mesh.cut(i, j, false);
    case Trouble::mend:
      return mesh.mend(i, j);
    case Trouble::stop:
      if (!mesh.up(i)) return;
      mesh.hand_over(i);
      mesh.advance(*between<Nanos>(0, 1000) * kMillisecond);
      [[fallthrough]];
    case Trouble::crash:
    case Trouble::lose_disk:
    case Trouble::restore_disk:
      mesh.crash(i);
      if (what == Trouble::lose_disk) mesh.lose_disk(i);
      if (what == Trouble::restore_disk) mesh.restore_disk(i);
      mesh.advance(*between<Nanos>(0, 2000) * kMillisecond);
      mesh.boot(i);
      if (what == Trouble::stop) return;
      reached(what == Trouble::crash       ? "a crash"
              : what == Trouble::lose_disk ? "a lost disk"
                                           : "an older copy of a disk");
      return;
    case Trouble::copy_disk:
      return mesh.copy_disk(i);
    case Trouble::reincarnate:
      mesh.reincarnate(i);
      return reached("another incarnation of a process");
    case Trouble::stall:
      return mesh.stall(i, true);
    case Trouble::unstall:
      return mesh.stall(i, false);
  }
}

/// The coverage classes of live() and trouble().
#define WEIR_LIVE_CLASSES                                                                          \
  "admitted", "denied while others have rights", "no wait for the disk", "a crash", "a lost disk", \
      "an older copy of a disk", "another incarnation of a process"

/// Told of every request of live().
using Asked = std::function<void(const std::string& key, std::uint64_t hits, const Decision&)>;

/// Asks somewhere, or lets time pass, or something goes wrong.
inline void live(Mesh& mesh, const Rule& rule, bool memory_only, const Asked& asked = {}) {
  if (*chance(8)) {
    trouble(mesh);
  } else if (*chance(60)) {
    std::size_t node = *between<std::size_t>(0, mesh.size() - 1);
    if (!mesh.up(node)) return;
    std::string key = *chance(80) ? "k" : "l";
    auto hits = *chance(60) ? std::uint64_t{1} : *between<std::uint64_t>(1, 6);
    Decision decision = mesh.spend(node, key, hits);
    if (asked) asked(key, hits, decision);
    reached("admitted", decision.allowed);
    reached("denied while others have rights",
            !decision.allowed && decision.statuses[0].exhausted_locally);
    if (rule.durability != Durability::commit && !memory_only) {
      reached("no wait for the disk", decision.allowed && !decision.wants_commit);
    }
  } else {
    mesh.advance(*rc::gen::weightedOneOf<Nanos>({{4, between<Nanos>(0, 60)},
                                                 {3, between<Nanos>(0, 600)},
                                                 {1, between<Nanos>(0, 4000)}}) *
                 kMillisecond);
  }
}

}  // namespace weir::laws
