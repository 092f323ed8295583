#include <weir/proptests/real/schedule.h>

#include <fmt/format.h>

#include <algorithm>
#include <random>

namespace weir::real {
namespace {

constexpr std::size_t kMostFaultyNodes = 3;

class Random {
 public:
  explicit Random(std::uint64_t seed) : engine_(seed) {}
  std::uint32_t below(std::size_t n) { return static_cast<std::uint32_t>(engine_() % n); }
  Nanos between(Nanos low, Nanos high) {  // in milliseconds, so that a schedule is read easily
    auto steps = static_cast<std::uint64_t>((high - low) / kMillisecond) + 1;
    return low + static_cast<Nanos>(engine_() % steps) * kMillisecond;
  }
  bool chance(std::uint32_t percent) { return below(100) < percent; }

 private:
  std::mt19937_64 engine_;
};

void node_faults(Random& random, Nanos length, std::uint32_t nodes, std::vector<Step>& out) {
  std::vector<Nanos> busy_until(nodes, 0);
  for (Nanos at = random.between(kSecond, 3 * kSecond); at < length;
       at += random.between(500 * kMillisecond, 3 * kSecond)) {
    auto busy = std::count_if(busy_until.begin(), busy_until.end(),
                              [at](Nanos until) { return until > at; });
    std::uint32_t node = random.below(nodes);
    std::uint32_t kind = random.below(100);
    Nanos offset = random.between(-kMaxClockOffset, kMaxClockOffset);
    Nanos down = random.between(50 * kMillisecond, 3 * kSecond);
    Nanos pause = random.between(kSecond, 8 * kSecond);
    if (busy_until[node] > at || static_cast<std::size_t>(busy) >= kMostFaultyNodes) continue;
    Step begin{at, kind < 50 ? Act::kill : kind < 65 ? Act::stop : Act::pause, node, 0, {}, {}};
    Step end = begin;
    end.at = std::min(length, at + (begin.act == Act::pause ? pause : down));
    end.act = begin.act == Act::pause ? Act::resume : Act::start;
    if (end.act == Act::start) end.clock_offset = offset;
    // Long enough to be asked for something before its next fault.
    busy_until[node] = end.at + random.between(300 * kMillisecond, 2 * kSecond);
    out.push_back(begin);
    out.push_back(end);
  }
}

std::vector<Drop> drops_of(Random& random, Partition partition, std::uint32_t nodes) {
  std::vector<std::uint32_t> order(nodes);
  for (std::uint32_t i = 0; i < nodes; ++i) order[i] = i;
  for (std::uint32_t i = nodes; i > 1; --i) std::swap(order[i - 1], order[random.below(i)]);
  if (partition == Partition::one_way) return {{order[0], order[1]}};
  if (partition == Partition::pair) return {{order[0], order[1]}, {order[1], order[0]}};
  std::uint32_t side = partition == Partition::isolated ? 1 : nodes / 2;
  std::vector<Drop> out;
  for (std::uint32_t a = 0; a < side; ++a) {
    for (std::uint32_t b = side; b < nodes; ++b) {
      out.emplace_back(order[a], order[b]);
      out.emplace_back(order[b], order[a]);
    }
  }
  return out;
}

void partitions(Random& random, Nanos length, std::uint32_t nodes, std::vector<Step>& out) {
  for (Nanos at = random.between(2 * kSecond, 5 * kSecond); at < length;) {
    Step begin{at, Act::cut, 0, 0, kPartitions[random.below(std::size(kPartitions))], {}};
    begin.drops = drops_of(random, begin.partition, nodes);
    Step end = begin;
    // Short ones heal before the nodes notice, long ones after sessions are given up.
    end.at = std::min(length, at + (random.chance(30) ? random.between(200 * kMillisecond, kSecond)
                                                      : random.between(2 * kSecond, 10 * kSecond)));
    end.act = Act::heal;
    at = end.at + random.between(kSecond, 6 * kSecond);
    out.push_back(std::move(begin));
    out.push_back(std::move(end));
  }
}

}  // namespace

std::string_view to_string(Act act) {
  switch (act) {
    case Act::kill:
      return "kill -9";
    case Act::stop:
      return "stop";
    case Act::start:
      return "start";
    case Act::pause:
      return "pause";
    case Act::resume:
      return "resume";
    case Act::cut:
      return "cut";
    case Act::heal:
      return "heal";
  }
  return "?";
}

std::string_view to_string(Partition partition) {
  switch (partition) {
    case Partition::isolated:
      return "isolated";
    case Partition::split:
      return "split";
    case Partition::pair:
      return "pair";
    case Partition::one_way:
      return "one_way";
  }
  return "?";
}

Schedule make_schedule(std::uint64_t seed, Nanos length, std::uint32_t nodes) {
  Random random(seed);
  Schedule out;
  for (std::uint32_t i = 0; i < nodes; ++i) {
    out.first_offsets.push_back(random.between(-kMaxClockOffset, kMaxClockOffset));
  }
  out.round_trips.assign(nodes, std::vector<Nanos>(nodes, 0));
  for (std::uint32_t a = 0; a < nodes; ++a) {
    for (std::uint32_t b = a + 1; b < nodes; ++b) {
      out.round_trips[a][b] = out.round_trips[b][a] =
          random.between(80 * kMillisecond, 150 * kMillisecond);
    }
  }
  node_faults(random, length, nodes, out.steps);
  partitions(random, length, nodes, out.steps);
  // What ends at an instant ends before something else begins; healing comes last at the very end.
  std::stable_sort(out.steps.begin(), out.steps.end(),
                   [](const Step& a, const Step& b) { return a.at < b.at; });
  return out;
}

std::string to_string(const Step& step) {
  if (step.act == Act::cut || step.act == Act::heal) {
    std::string drops;
    for (auto [from, to] : step.drops) drops += fmt::format(" {}>{}", from + 1, to + 1);
    return fmt::format("{} {}{}", to_string(step.act), to_string(step.partition), drops);
  }
  std::string out = fmt::format("{} node {}", to_string(step.act), step.node + 1);
  if (step.act == Act::start) {
    out += fmt::format(", clock {:+d} ms", step.clock_offset / kMillisecond);
  }
  return out;
}

std::string to_string(const Schedule& schedule) {
  std::string out;
  for (std::size_t i = 0; i < schedule.first_offsets.size(); ++i) {
    out += fmt::format("node {}: clock {:+d} ms, round trips", i + 1,
                       schedule.first_offsets[i] / kMillisecond);
    for (Nanos trip : schedule.round_trips[i]) out += fmt::format(" {}", trip / kMillisecond);
    out += " ms\n";
  }
  for (const Step& step : schedule.steps) {
    out += fmt::format("{:8.3f} {}\n", static_cast<double>(step.at) / 1e9, to_string(step));
  }
  return out;
}

std::uint32_t components(std::uint32_t nodes, const std::set<Drop>& drops) {
  std::vector<std::vector<bool>> reach(nodes, std::vector<bool>(nodes));
  for (std::uint32_t a = 0; a < nodes; ++a) {
    for (std::uint32_t b = 0; b < nodes; ++b) reach[a][b] = !drops.contains({a, b});
  }
  for (std::uint32_t via = 0; via < nodes; ++via) {
    for (std::uint32_t a = 0; a < nodes; ++a) {
      for (std::uint32_t b = 0; b < nodes; ++b) {
        if (reach[a][via] && reach[via][b]) reach[a][b] = true;
      }
    }
  }
  std::uint32_t out = 0;
  for (std::uint32_t a = 0; a < nodes; ++a) {
    bool first = true;  // of its component
    for (std::uint32_t b = 0; b < a; ++b) first = first && !(reach[a][b] && reach[b][a]);
    if (first) ++out;
  }
  return out;
}

}  // namespace weir::real
