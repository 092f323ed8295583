#include "law.h"
#include "schedules.h"

namespace weir::laws {
namespace {

const std::vector<Act> kFaults{Act::crash,   Act::boot,       Act::lose_disk, Act::stall,
                               Act::unstall, Act::cut,        Act::mend,      Act::disconnect,
                               Act::connect, Act::reincarnate};

LAW(29, "no peer ever saw an own value above a durable one", "a stalled disk",
    "a crash before the commit", "an urgent count", "a flush before the commit",
    "a relay's message") {
  MeshOptions options = *mesh_options(2, 3).as("mesh");
  options.memory_only = false;
  auto schedule = *schedules(options.nodes, kFaults).as("schedule");
  Mesh mesh(options);
  for (const Step& step : schedule) {
    play(mesh, step);
    if (step.act == Act::count && mesh.up(step.node) && *chance(20)) {
      mesh.flush(step.node);
      reached("a flush before the commit");
    }
    // The replica's own view is what it may send.
    for (std::size_t i = 0; i < mesh.size(); ++i) {
      if (!mesh.up(i)) continue;
      crdt::SlotId own{mesh.replica(i).incarnation(), 0};
      for (const auto& [id, cell] : mesh.state(i)) {
        auto ever = mesh.durable().find({id, own});
        RC_ASSERT(cell.value_of(own) <= (ever == mesh.durable().end() ? 0 : ever->second));
      }
    }
    for (const std::string& promise : mesh.broken()) RC_FAIL(promise);
    reached("a stalled disk", step.act == Act::stall);
    reached("an urgent count", step.act == Act::count && step.urgent);
  }
  RC_ASSERT(mesh.settle());
  assert_agreement(mesh);
  reached("a crash before the commit", mesh.writes_lost() > 0);
  reached("a relay's message", mesh.messages(4) > 0);
}

LAW(31, "increments after any restart are never masked", "counted after a restart", "a lost disk",
    "a crash before the commit", "an incarnation changed alive",
    "news on its way during the restart", "several boots in one cell") {
  MeshOptions options = *mesh_options(2, 4).as("mesh");
  options.memory_only = false;
  options.loss_percent = *one_of<int>({0, 10});
  auto schedule = *schedules(options.nodes, kFaults).as("schedule");
  Mesh mesh(options);
  crdt::CellId shared{{1, 1}, {kStart - kHour, kStart + kDay}};
  std::uint64_t restarts = 0;
  for (const Step& step : schedule) {
    play(mesh, step);
    reached("an incarnation changed alive", step.act == Act::reincarnate && mesh.up(step.node));
    // In one cell everybody counts small values all the time, so that an old value would mask.
    if (step.act == Act::boot && mesh.up(step.node)) ++restarts;
    if (*chance(30)) {
      mesh.add(step.node, shared, 1);
      reached("counted after a restart", restarts > 0);
    }
  }
  RC_ASSERT(mesh.settle());
  assert_agreement(mesh);
  auto state = mesh.state(0);
  std::map<crdt::CellId, std::uint64_t> least;
  for (const auto& [slot, value] : mesh.durable()) {
    const std::optional<crdt::Cell> cell = mesh.replica(0).find(slot.first);
    std::uint64_t there = !cell ? 0 : cell->value_of(slot.second);
    RC_ASSERT(there <= value);
    // Only a disk that was lost before anybody had seen it may take counts along.
    if (!mesh.lost_disks().contains(slot.second.writer.hi - 1)) RC_ASSERT(there == value);
  }
  // A node that counts now is seen everywhere, at once above what was there.
  for (std::size_t i = 0; i < mesh.size(); ++i) {
    std::uint64_t before = state.contains(shared) ? mesh.replica(0).find(shared)->total() : 0;
    mesh.add(i, shared, 1);
    RC_ASSERT(mesh.settle());
    RC_ASSERT(mesh.replica(0).find(shared)->total() == before + 1);
    state = mesh.state(0);
  }
  reached("a lost disk", !mesh.lost_disks().empty());
  reached("a crash before the commit", mesh.writes_lost() > 0);
  reached("news on its way during the restart", mesh.restarts_with_news() > 0);
  reached("several boots in one cell", state.at(shared).slots.size() > mesh.size());
}

LAW(31, "nor masked or counted twice when a limiter goes on under a fresh incarnation", "buckets",
    "windows", "a fresh incarnation", "units not handed over yet", "counted after it") {
  MeshOptions options = *mesh_options(2, 3).as("mesh");
  Rule rule;
  rule.domain = "api";
  rule.name = "r";
  rule.key = {"key"};
  rule.algorithm =
      *one_of<Algorithm>({Algorithm::fixed_window, Algorithm::token_bucket}).as("algorithm");
  rule.limit = 1'000'000;
  rule.window = kDay;
  options.rules = rule_set({rule});
  Mesh mesh(options);
  std::uint64_t fresh = 0;
  for (int step = *between(1, 40).as("steps"); step > 0; --step) {
    std::size_t node = *between<std::size_t>(0, mesh.size() - 1);
    mesh.advance(*between<Nanos>(0, 200) * kMillisecond);
    mesh.check(node, "k", *between<std::uint64_t>(1, 5));
    reached("counted after it", fresh > 0);
    if (!*chance(15)) continue;
    mesh.reincarnate(node);
    reached("units not handed over yet");
    ++fresh;
  }
  RC_ASSERT(mesh.settle());
  assert_agreement(mesh);
  std::uint64_t units = 0;
  for (const Admission& admission : mesh.admissions()) units += admission.units;
  RC_ASSERT(mesh.state(0).begin()->second.total() == units);
  for (std::size_t i = 0; i < mesh.size(); ++i) {
    std::vector<Entry> entries{{"key", "k"}};
    std::uint64_t used = mesh.limiter(i).used(0, {"api", entries, 1}, mesh.now());
    // A bucket has given some back, of a million a day.
    auto given_back = static_cast<std::uint64_t>((mesh.now() - kStart) / (kDay / 1'000'000)) + 1;
    RC_ASSERT(used <= units);
    RC_ASSERT(used + (rule.algorithm == Algorithm::token_bucket ? given_back : 0) >= units);
  }
  reached("a fresh incarnation", fresh > 0);
  reached("buckets", rule.algorithm == Algorithm::token_bucket);
  reached("windows", rule.algorithm == Algorithm::fixed_window);
}

}  // namespace
}  // namespace weir::laws
