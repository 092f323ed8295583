// Kills a process that writes, at random moments, and looks at what the disk then holds.

#include <fcntl.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <thread>

#include <weir/storage/lmdb_store.h>
#include <weir/storage/test_util.h>

extern char** environ;

namespace weir::storage::testing {
namespace {

constexpr Nanos kT0 = 1'704'067'200 * kSecond;
constexpr int kRounds = 20;
constexpr int kReportFd = 3;

/// What survives the child: it is in a mapped file, which a kill does not undo.
struct Shared {
  std::atomic<std::uint64_t> appended{0};  ///< raised before the write is handed in
};

crdt::Epoch round_epoch(std::uint64_t round) {
  return {kT0 + static_cast<Nanos>(round) * kHour, kT0 + static_cast<Nanos>(round + 1) * kHour};
}

/// Write `id` of a round: a cell of its own, one that all writes share, and a bucket.
crdt::Delta write_of(std::uint64_t round, std::uint64_t id) {
  crdt::Delta delta;
  delta.cells.push_back(windowed(1000 + id, round_epoch(round), {{round, id}}));
  delta.cells.push_back(windowed(1, round_epoch(round), {{round, id}}));
  delta.cells.push_back(bucket(7, 1, round, id, kT0, kT0 + kDay));
  delta.members[incarnation(round)] = {"eu", "node-1"};
  return delta;
}

LmdbTuning busy() {
  LmdbTuning tuning;
  tuning.fold_age = std::chrono::milliseconds(3);
  tuning.scan_interval = std::chrono::milliseconds(1);
  return tuning;
}

Shared* map_shared(const std::string& path, bool make) {
  int fd = ::open(path.c_str(), O_RDWR | O_CLOEXEC | (make ? O_CREAT | O_TRUNC : 0), 0600);
  if (fd < 0 || (make && ::ftruncate(fd, sizeof(Shared)) != 0)) return nullptr;
  void* at = ::mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  ::close(fd);
  return at == MAP_FAILED ? nullptr : static_cast<Shared*>(at);
}

/// Writes until it is killed, and reports each commit on kReportFd.
int run_child(const std::string& dir, std::uint64_t round) {
  Shared* shared = map_shared(dir + "/shared", false);
  if (shared == nullptr) return 2;
  auto store = make_lmdb_store(options_for(dir + "/store"), busy(), {});
  StoreEvents events;
  events.committed = [](crdt::WriteId upto) {
    if (::write(kReportFd, &upto, sizeof upto) != sizeof upto) ::_exit(3);
  };
  events.failed = [](const std::string&) { ::_exit(4); };
  Recovered recovered;
  std::string error;
  if (!store->open(incarnation(round), kT0, events, recovered, error)) {
    std::fprintf(stderr, "%s\n", error.c_str());
    return 5;
  }
  for (std::uint64_t id = 1;; ++id) {
    while (store->backlog() > 200) std::this_thread::yield();
    shared->appended.store(id);
    if (id % 16 == 0) store->reserve_time(kT0 + static_cast<Nanos>(round * 1'000'000 + id));
    store->append({id, write_of(round, id)});
  }
}

struct Round {
  std::uint64_t acknowledged = 0;
  std::uint64_t appended = 0;
  std::uint64_t found = 0;
};

void kill_one(const std::string& dir, std::uint64_t round, std::mt19937_64& random, Round& out) {
  Shared* shared = map_shared(dir + "/shared", true);
  ASSERT_NE(shared, nullptr);
  int report[2];
  ASSERT_EQ(::pipe2(report, O_CLOEXEC), 0);
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_adddup2(&actions, report[1], kReportFd);
  std::string number = std::to_string(round);
  std::string mode = "--child";
  std::string place = dir;
  std::string name = "child";
  char* arguments[] = {name.data(), mode.data(), place.data(), number.data(), nullptr};
  pid_t child = 0;
  ASSERT_EQ(::posix_spawn(&child, "/proc/self/exe", &actions, nullptr, arguments, environ), 0);
  posix_spawn_file_actions_destroy(&actions);
  ::close(report[1]);
  auto read_one = [&] {
    std::uint64_t upto = 0;
    ssize_t got = ::read(report[0], &upto, sizeof upto);
    if (got == static_cast<ssize_t>(sizeof upto)) {
      EXPECT_GT(upto, out.acknowledged);
      out.acknowledged = upto;
    }
    return got > 0;
  };
  // From the first commit on, let it run for a while; some rounds end at the very start.
  bool alive = round % 5 == 0 || read_one();
  auto end = std::chrono::steady_clock::now() + std::chrono::microseconds(random() % 120'000);
  while (alive && std::chrono::steady_clock::now() < end) {
    struct pollfd waiting = {report[0], POLLIN, 0};
    if (::poll(&waiting, 1, 1) > 0) alive = read_one();
  }
  ::kill(child, SIGKILL);
  while (read_one()) {
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFSIGNALED(status)) << "the child ended by itself: " << status;
  ::close(report[0]);
  out.appended = shared->appended.load();
  ::munmap(shared, sizeof(Shared));
}

TEST(LmdbCrash, WhatWasAcknowledgedIsRecovered) {
  TempDir dir;
  std::uint64_t seed = std::random_device()();
  std::printf("random seed %llu\n", static_cast<unsigned long long>(seed));
  std::mt19937_64 random(seed);
  std::map<std::uint64_t, Round> rounds;
  std::vector<crdt::Incarnation> boots;
  std::uint64_t total = 0;
  for (std::uint64_t round = 1; round <= kRounds; ++round) {
    SCOPED_TRACE(round);
    kill_one(dir.path(), round, random, rounds[round]);
    if (HasFatalFailure()) return;
    total += rounds[round].acknowledged;

    auto store = make_lmdb_store(options_for(dir / "store"), busy(), {});
    Recovered recovered;
    std::string error;
    ASSERT_TRUE(store->open(incarnation(10'000 + round), kT0, {}, recovered, error)) << error;
    EXPECT_FALSE(recovered.clean && rounds[round].appended > 0);
    // A boot that wrote was durable first.
    if (rounds[round].appended > 0 || !recovered.incarnations.empty()) {
      for (const crdt::Incarnation& boot : boots) {
        EXPECT_NE(std::find(recovered.incarnations.begin(), recovered.incarnations.end(), boot),
                  recovered.incarnations.end());
      }
    }
    boots = recovered.incarnations;
    boots.push_back(incarnation(10'000 + round));
    if (rounds[round].appended > 0) {
      EXPECT_NE(std::find(boots.begin(), boots.end(), incarnation(round)), boots.end());
    }

    Model model = model_of(recovered.state);
    ASSERT_EQ(model.size(), recovered.state.cells.size());
    std::size_t expected_cells = 0;
    for (auto& [number, past] : rounds) {
      auto shared = model.find(windowed(1, round_epoch(number), {}).id);
      std::uint64_t found = shared == model.end() ? 0 : shared->second.total();
      EXPECT_GE(found, past.acknowledged) << "round " << number;
      EXPECT_LE(found, past.appended) << "round " << number;
      if (number != round) {
        EXPECT_EQ(found, past.found) << "round " << number;
      }
      past.found = found;
      // Commits are prefixes: exactly the writes up to the newest one found.
      expected_cells += found + (found > 0 ? 1 : 0);
      for (std::uint64_t id = 1; id <= found; ++id) {
        auto own = model.find(windowed(1000 + id, round_epoch(number), {}).id);
        ASSERT_NE(own, model.end()) << "round " << number << " lost write " << id;
        EXPECT_EQ(own->second.total(), id);
      }
      if (found > 0) {
        auto drip = model.find(bucket(7, 1, 1, 1, kT0, kT0).id);
        ASSERT_NE(drip, model.end());
        EXPECT_EQ(drip->second.value_of({incarnation(number), 1}), found);
        EXPECT_EQ(recovered.state.members.at(incarnation(number)), (crdt::Member{"eu", "node-1"}));
      }
      if (number == round && past.acknowledged >= 16) {
        EXPECT_GE(recovered.time_floor,
                  kT0 + static_cast<Nanos>(round * 1'000'000 + past.acknowledged / 16 * 16));
      }
    }
    EXPECT_EQ(model.size(), expected_cells + (expected_cells > 0 ? 1 : 0));
    // Every other time the store goes on from a crash of its own.
    if (round % 2 == 0) store->close(kT0);
  }
  std::printf("%llu writes acknowledged before the kills\n",
              static_cast<unsigned long long>(total));
  EXPECT_GT(total, 100u);
}

}  // namespace
}  // namespace weir::storage::testing

int main(int argc, char** argv) {
  if (argc == 4 && std::string_view(argv[1]) == "--child") {
    return weir::storage::testing::run_child(argv[2], std::strtoull(argv[3], nullptr, 10));
  }
  ::testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
