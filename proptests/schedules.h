#pragma once

#include <ostream>
#include <vector>

#include "generators.h"
#include "mesh.h"

/// What happens to a mesh, as a list that RapidCheck makes and shrinks.
namespace weir::laws {

enum class Act : std::uint8_t {
  count,
  pass,
  cut,
  cut_one_way,
  mend,
  disconnect,
  connect,
  crash,
  boot,
  lose_disk,
  reincarnate,
  stall,
  unstall
};

struct Step {
  Act act = Act::pass;
  std::size_t node = 0;
  std::size_t other = 1;
  crdt::CellId cell;
  std::uint64_t units = 0;
  bool urgent = false;
  Nanos time = 0;
};

inline void showValue(const Step& step, std::ostream& os) {
  static const char* const names[] = {
      "count", "pass", "cut",       "cut one way", "mend",  "disconnect", "connect",
      "crash", "boot", "lose disk", "reincarnate", "stall", "unstall"};
  os << names[static_cast<int>(step.act)] << " node " << step.node;
  if (step.act == Act::count) {
    os << " +" << step.units << (step.urgent ? " urgent in " : " in ");
    crdt::showValue(step.cell, os);
  } else if (step.act == Act::pass) {
    os << ' ' << step.time / kMillisecond << " ms";
  } else {
    os << " and " << step.other;
  }
}

inline void showValue(const MeshOptions& options, std::ostream& os) {
  os << options.nodes << (options.memory_only ? " nodes without disks" : " nodes")
     << ", delay up to " << options.max_delay / kMillisecond << " ms, commit up to "
     << options.max_commit / kMillisecond << " ms, loss " << options.loss_percent
     << "%, duplicates " << options.duplicate_percent << "%, seed " << options.seed;
}

/// Steps of the given kinds over windowed cells, besides counting and passing of time.
inline rc::Gen<std::vector<Step>> schedules(std::size_t nodes, std::vector<Act> acts) {
  auto step = rc::gen::exec([nodes, acts] {
    Step made;
    if (acts.empty() || *chance(70)) {
      made.act = *chance(40) ? Act::pass : Act::count;
    } else {
      made.act = *one_of(acts);
    }
    made.node = *between<std::size_t>(0, nodes - 1);
    made.other = (made.node + *between<std::size_t>(1, nodes - 1)) % nodes;
    if (made.act == Act::count) {
      made.cell = *window_ids();
      made.units = *rc::gen::weightedOneOf<std::uint64_t>(
          {{9, between<std::uint64_t>(1, 20)}, {2, rc::gen::just(kMax / 2)}});
      made.urgent = *chance(20);
    } else if (made.act == Act::pass) {
      made.time = *rc::gen::weightedOneOf<Nanos>({{3, between<Nanos>(0, 30)},
                                                  {2, between<Nanos>(0, 600)},
                                                  {1, between<Nanos>(0, 4000)}}) *
                  kMillisecond;
    }
    return made;
  });
  return rc::gen::container<std::vector<Step>>(step);
}

inline void play(Mesh& mesh, const Step& step) {
  switch (step.act) {
    case Act::count:
      return mesh.add(step.node, step.cell, step.units, step.urgent);
    case Act::pass:
      return mesh.advance(step.time);
    case Act::cut:
      return mesh.cut(step.node, step.other);
    case Act::cut_one_way:
      return mesh.cut(step.node, step.other, false);
    case Act::mend:
      return mesh.mend(step.node, step.other);
    case Act::disconnect:
      return mesh.disconnect(step.node, step.other);
    case Act::connect:
      return mesh.connect(step.node, step.other);
    case Act::crash:
      return mesh.crash(step.node);
    case Act::boot:
      return mesh.boot(step.node);
    case Act::lose_disk:
      return mesh.lose_disk(step.node);
    case Act::reincarnate:
      return mesh.reincarnate(step.node);
    case Act::stall:
      return mesh.stall(step.node, true);
    case Act::unstall:
      return mesh.stall(step.node, false);
  }
}

inline void play(Mesh& mesh, const std::vector<Step>& schedule) {
  for (const Step& step : schedule) play(mesh, step);
}

inline rc::Gen<MeshOptions> mesh_options(std::size_t least = 2, std::size_t most = 4) {
  return rc::gen::exec([least, most] {
    MeshOptions options;
    options.nodes = *between<std::size_t>(least, most);
    options.memory_only = *chance(25);
    options.loss_percent = *one_of<int>({0, 10, 40});
    options.duplicate_percent = *one_of<int>({0, 30});
    options.max_delay = *one_of<Nanos>({5, 50, 400}) * kMillisecond;
    options.max_commit = *one_of<Nanos>({0, 10, 150}) * kMillisecond;
    options.seed = *between<std::uint64_t>(1, 1'000'000);
    return options;
  });
}

/// Mostly none: all alike. The first node always has some.
inline void draw_weights(MeshOptions& options) {
  if (!*chance(40)) return;
  for (std::size_t i = 0; i < options.nodes; ++i) {
    options.weights.push_back(*between<std::uint32_t>(i == 0 ? 1 : 0, 3));
  }
}

/// Asserts that nobody broke a promise and that all nodes hold the same cells.
inline void assert_agreement(Mesh& mesh) {
  for (const std::string& promise : mesh.broken()) RC_FAIL(promise);
  for (std::size_t i = 1; i < mesh.size(); ++i) {
    RC_ASSERT(mesh.replica(i).digest() == mesh.replica(0).digest());
    RC_ASSERT(mesh.state(i) == mesh.state(0));
  }
}

}  // namespace weir::laws
