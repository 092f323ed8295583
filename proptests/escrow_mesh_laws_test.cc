#include <weir/limits/escrow/escrow_agent.h>

#include "law.h"
#include "schedules.h"
#include "troubles.h"

namespace weir::laws {
namespace {

Rule escrow_rule(std::uint64_t limit, Nanos window) {
  Rule rule;
  rule.domain = "api";
  rule.name = "r";
  rule.key = {"key"};
  rule.limit = limit;
  rule.window = window;
  rule.enforcement = Enforcement::escrow;
  return rule;
}

/// Peeks: what the node says is left there.
std::uint64_t left(Mesh& mesh, std::size_t node, const std::string& key) {
  std::vector<Entry> entries{{"key", key}};
  Decision decision = mesh.limiter(node).check({"api", entries, 0}, mesh.now());
  return decision.statuses.empty() ? 0 : decision.statuses[0].remaining;
}

std::uint64_t spent_now(Mesh& mesh, const Rule& rule, const std::string& key) {
  std::vector<Entry> entries{{"key", key}};
  std::size_t node = 0;
  while (!mesh.up(node)) ++node;
  crdt::SeriesId series = mesh.limiter(node).series_of(0, {"api", entries, 0});
  WindowShape shape = window_shape(rule, series);
  auto at = mesh.spent().find({series, shape.epoch(shape.index(mesh.now()))});
  return at == mesh.spent().end() ? 0 : at->second.units;
}

void no_more_than(Mesh& mesh, std::uint64_t limit) {
  for (const auto& [cell, spent] : mesh.spent()) RC_ASSERT(spent.units <= limit);
}

bool forgiven(const Mesh& mesh) {
  return std::any_of(mesh.spent().begin(), mesh.spent().end(),
                     [](const auto& each) { return each.second.forgiven > 0; });
}

struct World {
  MeshOptions options;
  Rule rule;
  std::uint64_t limit = 0;
};

World world(Nanos window) {
  World made;
  made.options = *mesh_options(2, 4).as("mesh");
  // Of small ones nothing is kept in reserve.
  made.limit =
      *(*chance(40) ? between<std::uint64_t>(1, 16) : between<std::uint64_t>(24, 40)).as("limit");
  made.rule = escrow_rule(made.limit, window);
  if (*chance(30)) made.rule.durability = Durability::commit;
  made.options.rules = rule_set({made.rule});
  draw_weights(made.options);
  return made;
}

LAW(23, "total used never exceeds the limit, at any instant, under any faults", WEIR_LIVE_CLASSES,
    "all used", "transferred", "taken over after a boot") {
  World made = world(*one_of<Nanos>({3, 20, 600}).as("window") * kSecond);
  Mesh mesh(made.options);
  mesh.advance(*one_of<Nanos>({0, 3}) * kSecond);
  auto steps = *between<int>(0, 150).as("steps");
  std::uint64_t most = 0;
  for (int step = 0; step < steps; ++step) {
    live(mesh, made.rule, made.options.memory_only);
    no_more_than(mesh, made.limit);
    for (const auto& [cell, spent] : mesh.spent()) most = std::max(most, spent.units);
  }
  reached("all used", most == made.limit);
  for (std::size_t i = 0; i < mesh.size(); ++i) {
    if (!mesh.up(i)) continue;
    reached("transferred", mesh.agent(i).counters().requests_served > 0);
    reached("taken over after a boot", mesh.agent(i).whole() && !mesh.lost_disks().contains(i) &&
                                           mesh.replica(i).incarnation().lo > mesh.size());
  }
}

/// Everybody spends as much as there is, for some seconds.
void exhaust(Mesh& mesh, const World& made) {
  for (int step = 0; step < 60; ++step) {
    for (std::size_t i = 0; i < mesh.size(); ++i) {
      if (mesh.up(i)) mesh.spend(i, "k", 1 + static_cast<std::uint64_t>(step) % 2);
      no_more_than(mesh, made.limit);
    }
    mesh.advance(100 * kMillisecond);
  }
  no_more_than(mesh, made.limit);
}

LAW(23, "a member that comes back, with its disk, an older one or none, spends nothing twice",
    "its disk", "an older copy", "no disk", "soon", "late", "used and not yet committed",
    "used what the copy does not know", "given away before") {
  World made = world(10 * kMinute);
  made.options.nodes = 2 + made.options.nodes % 2;
  made.options.memory_only = false;
  if (!made.options.weights.empty()) made.options.weights.resize(made.options.nodes, 1);
  Mesh mesh(made.options);
  mesh.advance(4 * kSecond);
  bool copied = *chance(40).as("a copy is made");
  if (copied) mesh.copy_disk(0);
  std::uint64_t used = 0;
  bool burst = *chance(50).as("all at once");
  for (int asked = *between<int>(0, 30).as("before"); asked > 0; --asked) {
    std::size_t node = *chance(60) ? 0 : *between<std::size_t>(0, mesh.size() - 1);
    used += mesh.spend(node, "k", 1).allowed && node == 0;
    mesh.advance(*between<Nanos>(0, burst ? 3 : 60) * kMillisecond);
  }
  mesh.advance(*one_of<Nanos>({0, 5, 300, 2000}).as("then") * kMillisecond);
  reached("given away before", mesh.agent(0).counters().requests_served > 0);
  std::uint64_t lost = mesh.writes_lost();
  mesh.crash(0);
  reached("used and not yet committed", used > 0 && mesh.writes_lost() > lost);
  bool none = !copied && *chance(40).as("the disk is lost");
  if (copied) mesh.restore_disk(0);
  if (none) mesh.lose_disk(0);
  reached(copied ? "an older copy" : none ? "no disk" : "its disk");
  reached("used what the copy does not know", copied && used > 0);
  bool soon = *chance(50);
  reached(soon ? "soon" : "late");
  mesh.advance((soon ? *between<Nanos>(0, 300) : *between<Nanos>(600, 3000)) * kMillisecond);
  mesh.boot(0);
  exhaust(mesh, made);
}

LAW(24, "what a node says is left there, is left in all", WEIR_LIVE_CLASSES, "something is left") {
  World made = world(*one_of<Nanos>({3, 20, 600}).as("window") * kSecond);
  Mesh mesh(made.options);
  mesh.advance(*one_of<Nanos>({0, 3}) * kSecond);
  auto steps = *between<int>(0, 100).as("steps");
  for (int step = 0; step < steps; ++step) {
    live(mesh, made.rule, made.options.memory_only);
    if (forgiven(mesh)) return;
    std::uint64_t all = spent_now(mesh, made.rule, "k");
    for (std::size_t i = 0; i < mesh.size(); ++i) {
      // Rights here are nobody else's: all of them together are still there.
      if (!mesh.up(i)) continue;
      all = add_saturated(all, left(mesh, i, "k"));
      reached("something is left", left(mesh, i, "k") > 0);
    }
    RC_ASSERT(all <= made.limit);
  }
}

LAW(46, "after a heal, unused rights reach demand", WEIR_LIVE_CLASSES, "others have used some",
    "a limit smaller than the members", "all by one") {
  World made = world(10 * kMinute);
  made.options.nodes = std::min<std::size_t>(made.options.nodes, 3);
  if (!made.options.weights.empty()) made.options.weights.resize(made.options.nodes);
  Mesh mesh(made.options);
  for (int step = *between<int>(0, 60).as("steps"); step > 0; --step)
    live(mesh, made.rule, made.options.memory_only);
  // All faults end, and the next window begins: whatever was lost, was lost of the one before.
  mesh.settle();
  mesh.advance(10 * kMinute - mesh.now() % (10 * kMinute) + kSecond);
  RC_ASSERT(spent_now(mesh, made.rule, "k") == 0u);
  std::size_t hungry = *between<std::size_t>(0, mesh.size() - 1).as("who asks");
  bool others = *chance(50).as("others have used some");
  for (int round = *between<int>(0, 20); others && round > 0; --round) {
    mesh.spend(*between<std::size_t>(0, mesh.size() - 1), "k", *one_of<std::uint64_t>({1, 1, 4}));
    mesh.advance(100 * kMillisecond);
  }
  reached("others have used some", others && spent_now(mesh, made.rule, "k") > 0);
  reached("a limit smaller than the members", made.limit < mesh.size());
  reached("all by one", !others);
  // One after the other, as a client would that tries again when it is told to; and some times
  // more, for what others keep in reserve.
  int denied = 0;
  for (int tries = 0; tries < 2000 && denied < 100; ++tries) {
    Decision decision = mesh.spend(hungry, "k", 1);
    bool exhausted_locally = !decision.allowed && decision.statuses[0].exhausted_locally;
    denied = decision.allowed ? 0 : denied + !exhausted_locally;
    mesh.advance(decision.allowed ? 20 * kMillisecond : 200 * kMillisecond);
  }
  mesh.advance(kSecond);
  RC_ASSERT(spent_now(mesh, made.rule, "k") == made.limit);
  Decision over = mesh.spend(hungry, "k", 1);
  RC_ASSERT(!over.allowed);
}

LAW(46, "what a node has left when it is stopped, the others can spend", "handed over",
    "nothing was left", "somebody else has used some", "back again") {
  World made = world(10 * kMinute);
  made.options.nodes = std::min<std::size_t>(made.options.nodes, 3);
  if (!made.options.weights.empty()) made.options.weights.resize(made.options.nodes, 1);
  Mesh mesh(made.options);
  mesh.settle();
  mesh.advance(10 * kMinute - mesh.now() % (10 * kMinute) + kSecond);
  const std::size_t leaving = *between<std::size_t>(0, mesh.size() - 1).as("who is stopped");
  const std::size_t hungry =
      (leaving + *between<std::size_t>(1, mesh.size() - 1).as("who asks")) % mesh.size();
  bool used = false;
  for (int i = *between<int>(1, 5); i > 0; --i) {
    used |= mesh.spend(leaving, "k", 1).allowed;
    mesh.advance(*one_of<Nanos>({5, 300}) * kMillisecond);
  }
  if (*chance(50)) mesh.spend(hungry, "k", 1);
  mesh.advance(*one_of<Nanos>({100, 3000}) * kMillisecond);
  if (!used) return;  // it does not know of what windows it has rights
  const bool had = left(mesh, leaving, "k") > 0;
  RC_ASSERT(mesh.hand_over(leaving) == (had ? 1u : 0u));
  RC_ASSERT(left(mesh, leaving, "k") == 0u);
  reached("handed over", had);
  reached("nothing was left", !had);
  reached("somebody else has used some", left(mesh, hungry, "k") < made.limit);
  mesh.advance(kSecond);
  mesh.crash(leaving);
  for (int tries = 0; tries < 300; ++tries) {
    bool passed = mesh.spend(hungry, "k", 1).allowed;
    mesh.advance(passed ? 20 * kMillisecond : 200 * kMillisecond);
    if (spent_now(mesh, made.rule, "k") == made.limit) break;
  }
  RC_ASSERT(spent_now(mesh, made.rule, "k") == made.limit);
  if (!*chance(30).as("it comes back")) return;
  mesh.boot(leaving);
  exhaust(mesh, made);
  reached("back again");
}

}  // namespace
}  // namespace weir::laws
