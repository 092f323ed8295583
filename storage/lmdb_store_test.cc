#include <weir/storage/lmdb_store.h>

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <lmdb.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <fstream>
#include <future>
#include <random>
#include <set>

#include <weir/storage/lmdb_check.h>
#include <weir/storage/record.h>
#include <weir/storage/test_util.h>

namespace weir::storage::testing {
namespace {

using ::testing::HasSubstr;

/// 2024, and epochs of ten seconds from there.
constexpr Nanos kT0 = 1'704'067'200 * kSecond;
crdt::Epoch epoch(std::int64_t number) {
  return {kT0 + number * 10 * kSecond, kT0 + (number + 1) * 10 * kSecond};
}

/// Boots are not among the writers that tests make up.
crdt::Incarnation boot_id(std::uint64_t number) {
  return incarnation(1'000'000 + number);
}

/// Equal, without printing all of both.
::testing::AssertionResult same(const Model& found, const Model& wanted) {
  for (const auto& [id, cell] : wanted) {
    auto at = found.find(id);
    if (at == found.end()) {
      return ::testing::AssertionFailure() << "no cell of series " << id.series.lo;
    }
    if (!(at->second == cell)) {
      return ::testing::AssertionFailure()
             << "series " << id.series.lo << (id.is_bucket() ? " (bucket)" : "") << ": total "
             << at->second.total() << " instead of " << cell.total() << ", expiry "
             << at->second.expiry() << " instead of " << cell.expiry();
    }
  }
  if (found.size() == wanted.size()) return ::testing::AssertionSuccess();
  return ::testing::AssertionFailure() << found.size() << " cells instead of " << wanted.size();
}

/// A store that is open; dropped without close(), it stops as a crash would stop it.
struct Opened {
  std::unique_ptr<Store> store;
  std::unique_ptr<Watch> watch = std::make_unique<Watch>();
  Recovered recovered;
  std::string error;
  bool good = false;

  void write(crdt::WriteId id, std::vector<crdt::Cell> cells,
             std::map<crdt::Incarnation, crdt::Member> members = {}) {
    store->append({id, {std::move(cells), std::move(members)}});
  }
};

Opened open_with(const LmdbOptions& options, std::uint64_t boot, LmdbTuning tuning = lazy(),
                 LmdbHooks hooks = {}, Nanos now = kT0) {
  Opened opened;
  opened.store = make_lmdb_store(options, tuning, std::move(hooks));
  opened.good = opened.store->open(boot_id(boot), now, opened.watch->events(), opened.recovered,
                                   opened.error);
  return opened;
}

Opened open_at(const std::string& path, std::uint64_t boot, LmdbTuning tuning = lazy(),
               LmdbHooks hooks = {}) {
  Opened opened = open_with(options_for(path), boot, tuning, std::move(hooks));
  EXPECT_TRUE(opened.good) << opened.error;
  return opened;
}

/// Names of the tables in a closed store, and how many entries each has.
std::map<std::string, std::size_t> tables_of(const std::string& path) {
  std::map<std::string, std::size_t> tables;
  MDB_env* env = nullptr;
  mdb_env_create(&env);
  mdb_env_set_maxdbs(env, 4096);
  EXPECT_EQ(mdb_env_open(env, path.c_str(), MDB_RDONLY, 0600), 0);
  MDB_txn* txn = nullptr;
  EXPECT_EQ(mdb_txn_begin(env, nullptr, MDB_RDONLY, &txn), 0);
  MDB_dbi main = 0;
  EXPECT_EQ(mdb_dbi_open(txn, nullptr, 0, &main), 0);
  MDB_cursor* cursor = nullptr;
  mdb_cursor_open(txn, main, &cursor);
  MDB_val key{};
  MDB_val value{};
  std::vector<std::string> names;
  while (mdb_cursor_get(cursor, &key, &value, MDB_NEXT) == 0) {
    names.emplace_back(static_cast<const char*>(key.mv_data), key.mv_size);
  }
  for (const std::string& name : names) {
    MDB_dbi dbi = 0;
    MDB_stat stat{};
    EXPECT_EQ(mdb_dbi_open(txn, name.c_str(), 0, &dbi), 0);
    mdb_stat(txn, dbi, &stat);
    tables[name] = stat.ms_entries;
  }
  mdb_cursor_close(cursor);
  mdb_txn_abort(txn);
  mdb_env_close(env);
  return tables;
}

/// Puts a raw value into a closed store's table.
void put_raw(const std::string& path, const char* table, View key, View value) {
  MDB_env* env = nullptr;
  mdb_env_create(&env);
  mdb_env_set_maxdbs(env, 64);
  ASSERT_EQ(mdb_env_open(env, path.c_str(), 0, 0600), 0);
  MDB_txn* txn = nullptr;
  ASSERT_EQ(mdb_txn_begin(env, nullptr, 0, &txn), 0);
  MDB_dbi dbi = 0;
  ASSERT_EQ(mdb_dbi_open(txn, table, MDB_CREATE, &dbi), 0);
  MDB_val k{key.size(), const_cast<std::byte*>(key.data())};
  MDB_val v{value.size(), const_cast<std::byte*>(value.data())};
  ASSERT_EQ(mdb_put(txn, dbi, &k, &v, 0), 0);
  ASSERT_EQ(mdb_txn_commit(txn), 0);
  mdb_env_close(env);
}

std::string read_file(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), {}};
}

void write_file(const std::string& path, const std::string& content) {
  std::ofstream out(path, std::ios::binary | std::ios::trunc);
  out.write(content.data(), static_cast<std::streamsize>(content.size()));
}

bool folded(const Opened& opened) {
  return eventually([&] { return opened.store->counters().log_records == 0; });
}

TEST(LmdbStore, NewStoreIsEmpty) {
  TempDir dir;
  Opened opened = open_at(dir / "a/b/c", 1);
  EXPECT_TRUE(opened.recovered.state.empty());
  EXPECT_EQ(opened.recovered.time_floor, 0);
  EXPECT_TRUE(opened.recovered.incarnations.empty());
  EXPECT_FALSE(opened.recovered.clean);
  EXPECT_EQ(opened.store->backlog(), 0u);
}

TEST(LmdbStore, RoundTripFromLogAndFromTables) {
  for (bool fold : {false, true}) {
    TempDir dir;
    crdt::Delta all;
    for (std::uint64_t i = 0; i < 50; ++i) {
      all.cells.push_back(windowed(i, epoch(static_cast<std::int64_t>(i % 3)),
                                   {{1, i + 1}, {2, ~std::uint64_t{0} - i}, {3, 1ull << i}}));
      all.cells.push_back(bucket(i, kT0 + i, 1, i + 1, kT0, kT0 + kMinute));
      // Of an escrow rule: slots are rows.
      all.cells.push_back(windowed(100 + i, epoch(1), {{2, i + 1}}));
      all.cells.back().raise({incarnation(1), 1}, 3);
      all.cells.back().raise({incarnation(1), ~std::uint64_t{0} - i}, i + 5);
    }
    for (std::uint64_t i = 1; i <= 3; ++i) {
      all.members[incarnation(i)] = {"region", "node-" + std::to_string(i)};
    }
    {
      Opened opened = open_at(dir.path(), 1, fold ? eager() : lazy());
      opened.store->append({7, all});
      ASSERT_TRUE(opened.watch->wait_committed(7));
      if (fold) {
        ASSERT_TRUE(folded(opened));
      }
      opened.store->close(kT0 + 5);
    }
    EXPECT_EQ(tables_of(dir.path()).at("log"), fold ? 0u : 1u);
    for (std::uint64_t boot = 2; boot < 4; ++boot) {
      Opened again = open_at(dir.path(), boot);
      EXPECT_EQ(again.recovered.state.cells.size(), all.cells.size());
      EXPECT_TRUE(same(model_of(again.recovered.state), model_of(all)));
      EXPECT_EQ(again.recovered.state.members, all.members);
      again.store->close(kT0 + 5);
    }
  }
}

TEST(LmdbStore, JoinsRecordsAndTables) {
  TempDir dir;
  Model model;
  std::vector<crdt::Delta> parts = {
      {{windowed(1, epoch(0), {{1, 5}}), bucket(9, kT0, 1, 3, kT0, kT0 + kMinute)}, {}},
      {{windowed(1, epoch(0), {{2, 7}}), windowed(1, epoch(1), {{1, 1}})}, {}},
      {{windowed(1, epoch(0), {{1, 4}, {2, 9}}), bucket(9, kT0, 2, 4, kT0 + 1, kT0 + kHour)}, {}},
      {{windowed(1, epoch(0), {{1, 6}})}, {}}};
  for (std::size_t i = 0; i < parts.size(); ++i) {
    Opened opened = open_at(dir.path(), 10 + i, i % 2 == 0 ? eager() : lazy());
    EXPECT_TRUE(same(model_of(opened.recovered.state), model));
    join_into(model, parts[i]);
    opened.store->append({1, parts[i]});
    ASSERT_TRUE(opened.watch->wait_committed(1));
    if (i % 2 == 0) {
      ASSERT_TRUE(folded(opened));
    }
  }
  Opened last = open_at(dir.path(), 20);
  EXPECT_EQ(last.recovered.state.cells.size(), model.size());
  EXPECT_TRUE(same(model_of(last.recovered.state), model));
  EXPECT_EQ(model.at(windowed(1, epoch(0), {}).id).total(), 6u + 9u);
}

TEST(LmdbStore, RemembersBootsAndRefusesAUsedIncarnation) {
  TempDir dir;
  std::vector<crdt::Incarnation> boots;
  for (std::uint64_t boot = 1; boot <= 5; ++boot) {
    Opened opened = open_at(dir.path(), boot);
    EXPECT_EQ(opened.recovered.incarnations, boots);
    boots.push_back(boot_id(boot));
    if (boot == 2) {
      opened.write(1, {windowed(1, epoch(0), {{77, 5}})});
      ASSERT_TRUE(opened.watch->wait_committed(1));
    }
    if (boot % 2 == 0) opened.store->close(kT0);
  }
  // Also one that only a peer's slot shows.
  for (crdt::Incarnation used : {boot_id(1), boot_id(3), boot_id(5), incarnation(77)}) {
    auto store = make_lmdb_store(options_for(dir.path()));
    Recovered recovered;
    std::string error;
    EXPECT_FALSE(store->open(used, kT0, {}, recovered, error));
    EXPECT_THAT(error, HasSubstr("used before"));
    EXPECT_THAT(error, HasSubstr(dir.path()));
  }
  Opened zero;
  zero.store = make_lmdb_store(options_for(dir.path()));
  EXPECT_FALSE(zero.store->open({}, kT0, {}, zero.recovered, zero.error));
  Opened next = open_at(dir.path(), 6);
  EXPECT_EQ(next.recovered.incarnations, boots);
}

TEST(LmdbStore, CleanFlagIsOfTheLastStopOnly) {
  TempDir dir;
  open_at(dir.path(), 1).store->close(kT0 + 1);
  Opened second = open_at(dir.path(), 2);
  EXPECT_TRUE(second.recovered.clean);
  second.store.reset();
  Opened third = open_at(dir.path(), 3);
  EXPECT_FALSE(third.recovered.clean);
  third.store->close(kT0 + 2);
  third.store->close(kT0 + 9);  // nothing is left to close
  Opened fourth = open_at(dir.path(), 4);
  EXPECT_TRUE(fourth.recovered.clean);
  EXPECT_EQ(fourth.recovered.time_floor, kT0 + 2);
}

/// A crash leaves no pause behind: what is lost when the clock is set back later has no hole where
/// the node ran.
TEST(LmdbStore, TheTimeLivedOutlivesACrashWhole) {
  TempDir dir;
  {
    Opened opened = open_at(dir.path(), 1);
    for (int i = 1; i <= 30; ++i) {
      opened.store->reserve_time(kT0 + i * kSecond);
      opened.write(static_cast<crdt::WriteId>(i), {});
      ASSERT_TRUE(opened.watch->wait_committed(static_cast<crdt::WriteId>(i)));
    }
  }
  Opened again = open_with(options_for(dir.path()), 2, lazy(), {}, kT0 + 10 * kSecond);
  ASSERT_TRUE(again.good) << again.error;
  const Recovered& out = again.recovered;
  EXPECT_EQ(out.set_back, 20 * kSecond);
  for (Nanos at = kT0 + kSecond; at <= kT0 + 30 * kSecond; at += kSecond) {
    EXPECT_TRUE(std::any_of(out.lost.lived.begin(), out.lost.lived.end(), [&](const auto& range) {
      return range.from <= at && at <= range.to;
    })) << (at - kT0) / kSecond;
  }
}

TEST(LmdbStore, TimeFloor) {
  TempDir dir;
  {
    Opened opened = open_at(dir.path(), 1);
    opened.store->reserve_time(kT0 + 100);
    opened.store->reserve_time(kT0 + 50);  // does not fall
    ASSERT_TRUE(eventually([&] { return opened.store->counters().commits >= 1; }));
    EXPECT_EQ(opened.watch->committed(), 0u);
  }
  {
    Opened opened = open_at(dir.path(), 2);
    EXPECT_EQ(opened.recovered.time_floor, kT0 + 100);
    // A write acknowledged after a reservation proves the reservation durable.
    opened.store->reserve_time(kT0 + 200);
    opened.write(1, {});
    ASSERT_TRUE(opened.watch->wait_committed(1));
  }
  {
    Opened opened = open_at(dir.path(), 3);
    EXPECT_EQ(opened.recovered.time_floor, kT0 + 200);
    opened.store->reserve_time(kT0 + 900);
    opened.store->close(kT0 + 300);
  }
  {
    Opened opened = open_at(dir.path(), 4);
    EXPECT_EQ(opened.recovered.time_floor, kT0 + 300);
    EXPECT_TRUE(opened.recovered.clean);
    // A boot that crashes without a reservation loses nothing of the floor.
  }
  {
    Opened opened = open_at(dir.path(), 5);
    EXPECT_EQ(opened.recovered.time_floor, kT0 + 300);
    opened.store->close(kT0 + 1);  // earlier boots decided later than that
  }
  Opened last = open_at(dir.path(), 6);
  EXPECT_EQ(last.recovered.time_floor, kT0 + 300);
}

TEST(LmdbStore, CloseCommitsWhatIsQueued) {
  TempDir dir;
  Opened opened = open_at(dir.path(), 1);
  for (std::uint64_t id = 1; id <= 500; ++id) {
    opened.write(id, {windowed(id, epoch(0), {{1, id}})});
  }
  opened.store->close(kT0);
  EXPECT_EQ(opened.watch->committed(), 500u);
  opened.write(501, {windowed(501, epoch(0), {{1, 1}})});
  EXPECT_EQ(opened.store->backlog(), 0u);
  EXPECT_EQ(open_at(dir.path(), 2).recovered.state.cells.size(), 500u);
  EXPECT_EQ(opened.watch->committed(), 500u);
}

TEST(LmdbStore, ExpiryDropsTables) {
  TempDir dir;
  Opened opened = open_at(dir.path(), 1, eager());
  Model live;
  std::set<std::string> live_tables;
  Nanos floor = epoch(9).expiry;
  for (std::uint64_t id = 1; id <= 20; ++id) {
    crdt::Cell cell = windowed(id, epoch(static_cast<std::int64_t>(id)), {{1, id}});
    crdt::Generation generation = crdt::generation_of(cell.id.epoch);
    if (generation.end() > floor) {
      live_tables.insert(table_name(generation));
      live[cell.id] = cell;
    }
    opened.write(id, {cell});
  }
  ASSERT_LT(live.size(), 20u);
  ASSERT_GT(live.size(), 8u);
  ASSERT_TRUE(opened.watch->wait_committed(20));
  ASSERT_TRUE(folded(opened));
  opened.store->expire(floor);
  ASSERT_TRUE(eventually([&] { return opened.store->counters().dropped_generations > 0; }));
  // A late cell of a dropped generation does not bring its table back.
  opened.write(21, {windowed(99, epoch(2), {{1, 1}})});
  ASSERT_TRUE(opened.watch->wait_committed(21));
  ASSERT_TRUE(folded(opened));
  std::uint64_t dropped = opened.store->counters().dropped_generations;
  opened.store->expire(floor - kSecond);  // does not fall
  opened.store->close(kT0);
  std::set<std::string> found;
  for (const auto& [name, entries] : tables_of(dir.path())) {
    if (name.starts_with("g/")) found.insert(name);
  }
  EXPECT_EQ(found, live_tables);
  EXPECT_GE(dropped, 1u);
  EXPECT_TRUE(same(model_of(open_at(dir.path(), 2).recovered.state), live));
}

TEST(LmdbStore, ExpiryDropsManyGenerationsAndHandles) {
  TempDir dir;
  LmdbTuning tuning = eager();
  tuning.max_handles = 10;
  Opened opened = open_at(dir.path(), 1, tuning);
  constexpr std::int64_t kEpochs = 700;
  crdt::Delta all;
  for (std::int64_t i = 0; i < kEpochs; ++i) {
    all.cells.push_back(windowed(1, epoch(i), {{1, 5}}));
    opened.write(static_cast<crdt::WriteId>(i) + 1, {all.cells.back()});
  }
  ASSERT_TRUE(opened.watch->wait_committed(kEpochs));
  ASSERT_TRUE(folded(opened));
  opened.store->close(kT0);
  EXPECT_GE(tables_of(dir.path()).size(), static_cast<std::size_t>(kEpochs));
  Opened again = open_at(dir.path(), 2, tuning);
  EXPECT_TRUE(same(model_of(again.recovered.state), model_of(all)));
  again.store->expire(epoch(kEpochs + 10).expiry);
  EXPECT_TRUE(eventually(
      [&] { return again.store->counters().dropped_generations >= std::uint64_t{kEpochs}; }));
  again.store->close(kT0);
  EXPECT_EQ(tables_of(dir.path()).size(), 3u);
}

TEST(LmdbStore, BucketsAreDeletedOncePastExpiry) {
  TempDir dir;
  Opened opened = open_at(dir.path(), 1, eager());
  constexpr std::uint64_t kBuckets = 100;
  for (std::uint64_t id = 1; id <= kBuckets; ++id) {
    Nanos expiry = kT0 + static_cast<Nanos>(id) * kSecond;
    opened.write(id, {bucket(id, kT0, 1, id, kT0, expiry)});
  }
  ASSERT_TRUE(opened.watch->wait_committed(kBuckets));
  opened.store->expire(kT0 + 40 * kSecond);
  // Scans follow the fold; a second floor shows that they go on.
  opened.store->expire(kT0 + 60 * kSecond);
  auto left = [&] {
    opened.store->close(kT0);
    std::size_t count = tables_of(dir.path())["buckets"];
    static std::uint64_t boot = 100;
    opened = open_at(dir.path(), ++boot, eager());
    opened.store->expire(kT0 + 60 * kSecond);
    ::usleep(20'000);
    return count;
  };
  EXPECT_TRUE(eventually([&] { return left() == 40u; }));
  Model model = model_of(opened.recovered.state);
  EXPECT_EQ(model.size(), 40u);
  for (const auto& [id, cell] : model) EXPECT_GT(cell.bucket.expiry, kT0 + 60 * kSecond);
}

TEST(LmdbStore, ABucketIsNotDeletedWhileNewsOfItWaits) {
  TempDir dir;
  crdt::Cell old_part = bucket(1, kT0, 1, 5, kT0, kT0 + 10 * kSecond);
  crdt::Cell new_part = bucket(1, kT0, 2, 3, kT0 + kSecond, kT0 + 100 * kSecond);
  crdt::Cell whole = old_part;
  crdt::join(whole, new_part);
  {
    Opened opened = open_at(dir.path(), 1, eager());
    opened.write(1, {old_part});
    ASSERT_TRUE(opened.watch->wait_committed(1));
    ASSERT_TRUE(folded(opened));
  }
  {
    // The new part stays in the log while expiry passes what the table says.
    LmdbTuning tuning = eager();
    tuning.fold_age = std::chrono::hours(1);
    Opened opened = open_at(dir.path(), 2, tuning);
    opened.write(1, {new_part});
    opened.store->expire(kT0 + 50 * kSecond);
    ASSERT_TRUE(opened.watch->wait_committed(1));
    ::usleep(30'000);
    opened.store->close(kT0);
  }
  EXPECT_EQ(tables_of(dir.path()).at("buckets"), 1u);
  {
    Opened opened = open_at(dir.path(), 3, eager());
    EXPECT_TRUE(same(model_of(opened.recovered.state), (Model{{whole.id, whole}})));
    opened.store->expire(kT0 + 50 * kSecond);
    ASSERT_TRUE(folded(opened));
    ::usleep(30'000);
  }
  EXPECT_TRUE(same(model_of(open_at(dir.path(), 4).recovered.state), (Model{{whole.id, whole}})));
}

TEST(LmdbStore, ABucketThatCameBackDoesNotKeepItsOldSlots) {
  TempDir dir;
  LmdbTuning tuning = eager();
  tuning.scan_interval = std::chrono::hours(1);  // the first scan alone
  Opened opened = open_at(dir.path(), 1, tuning);
  opened.store->expire(kT0 - kSecond);
  ::usleep(20'000);
  opened.write(1, {bucket(1, kT0, 1, 5, kT0, kT0 + 10 * kSecond)});
  ASSERT_TRUE(opened.watch->wait_committed(1));
  ASSERT_TRUE(folded(opened));
  opened.store->expire(kT0 + 20 * kSecond);
  ::usleep(50'000);
  crdt::Cell fresh = bucket(1, kT0 + 30 * kSecond, 1, 2, kT0 + 30 * kSecond, kT0 + 40 * kSecond);
  opened.write(2, {fresh});
  ASSERT_TRUE(opened.watch->wait_committed(2));
  ASSERT_TRUE(folded(opened));
  opened.store->close(kT0);
  EXPECT_TRUE(same(model_of(open_at(dir.path(), 2).recovered.state), (Model{{fresh.id, fresh}})));
}

TEST(LmdbStore, BucketsAreNotScannedBeforeOneHasExpired) {
  TempDir dir;
  LmdbTuning tuning = eager();
  tuning.scan_interval = tuning.scan_pace = std::chrono::milliseconds(1);
  Opened opened = open_at(dir.path(), 1, tuning);
  opened.write(1, {bucket(1, kT0, 1, 5, kT0, kT0 + 60 * kSecond)});
  ASSERT_TRUE(opened.watch->wait_committed(1));
  ASSERT_TRUE(folded(opened));
  const auto scanned = [&] { return opened.store->counters().scanned_buckets; };
  const auto scanned_soon = [&](std::uint64_t than) {
    for (int i = 0; i < 500 && scanned() <= than; ++i) ::usleep(10'000);
    return scanned() > than;
  };
  opened.store->expire(kT0 + kSecond);
  ASSERT_TRUE(scanned_soon(0)) << "what is on the disk has not been looked at";
  const std::uint64_t first = scanned();
  for (int i = 2; i < 52; ++i) {
    opened.store->expire(kT0 + i * kSecond);
    ::usleep(2'000);
  }
  EXPECT_EQ(scanned(), first) << "nothing had expired";
  opened.store->expire(kT0 + 60 * kSecond);
  EXPECT_TRUE(scanned_soon(first));
  opened.store->close(kT0);
  EXPECT_TRUE(open_at(dir.path(), 2).recovered.state.cells.empty());
}

/// Random writes, expiry, and stops of both kinds, against the join of everything acknowledged.
void random_run(std::uint64_t seed) {
  SCOPED_TRACE(seed);
  std::mt19937_64 random(seed);
  auto below = [&](std::uint64_t limit) { return random() % limit; };
  TempDir dir;
  Model model;
  Nanos floor = 0;
  auto live = [&](const Model& all) {
    Model rest;
    for (const auto& [id, cell] : all) {
      if (cell.expiry() > floor) rest[id] = cell;
    }
    return rest;
  };
  std::uint64_t time = 0;
  for (std::uint64_t boot = 1; boot <= 8; ++boot) {
    LmdbTuning tuning = below(4) == 0 ? lazy() : eager();
    tuning.record_cells = 1 + below(40);
    tuning.fold_step_cells = 1 + below(200);
    tuning.fold_cells = 50 + below(2000);
    tuning.commit_bytes = 500 + below(20'000);
    tuning.max_handles = below(3);
    Opened opened = open_at(dir.path(), 1000 + boot, tuning);
    ASSERT_TRUE(opened.good);
    // What is expired may be gone, in part or whole; nothing else may differ.
    ASSERT_TRUE(same(live(model_of(opened.recovered.state)), live(model)));
    for (const auto& [id, cell] : model_of(opened.recovered.state)) {
      ASSERT_TRUE(model.contains(id));
      crdt::Cell joined = model.at(id);
      if (!id.is_bucket()) {
        ASSERT_FALSE(crdt::join(joined, cell)) << "recovered what was never written";
      }
    }
    std::uint64_t writes = 1 + below(60);
    for (std::uint64_t id = 1; id <= writes; ++id) {
      crdt::Delta delta;
      for (std::uint64_t cells = below(50); cells > 0; --cells) {
        std::uint64_t writer = 1 + below(4);
        if (below(3) != 0) {
          auto number = static_cast<std::int64_t>(time / 40 + below(3));
          delta.cells.push_back(windowed(below(30), epoch(number), {{writer, 1 + below(1000)}}));
          continue;
        }
        // As a replica would: a bucket that has expired comes back under a new birth.
        Nanos at = epoch(static_cast<std::int64_t>(time / 40)).start;
        delta.cells.push_back(bucket(below(10), kT0, writer, 1 + below(1000), at,
                                     at + kHour + static_cast<Nanos>(below(100)) * kSecond));
      }
      join_into(model, delta);
      opened.store->append({id, std::move(delta)});
      ++time;
      if (below(20) == 0) {
        floor = std::max(floor, epoch(static_cast<std::int64_t>(time / 40)).start - 20 * kSecond);
        opened.store->expire(floor);
      }
      if (below(10) == 0) ::usleep(static_cast<useconds_t>(below(3000)));
    }
    if (below(2) == 0) {
      opened.store->close(kT0);
    } else {
      ASSERT_TRUE(opened.watch->wait_committed(writes));
    }
    EXPECT_TRUE(opened.watch->ordered());
    EXPECT_EQ(opened.watch->failures(), std::vector<std::string>());
  }
}

TEST(LmdbStore, RandomRunsEqualTheModel) {
  for (std::uint64_t seed = 1; seed <= 12; ++seed) random_run(seed);
  std::uint64_t seed = std::random_device()();
  std::printf("random seed %llu\n", static_cast<unsigned long long>(seed));
  random_run(seed);
}

TEST(LmdbStore, AppendsFromManyThreads) {
  TempDir dir;
  Opened opened = open_at(dir.path(), 1, eager());
  constexpr std::uint64_t kThreads = 4;
  constexpr std::uint64_t kWrites = 200;
  std::mutex order;
  crdt::WriteId last = 0;
  std::vector<std::thread> threads;
  for (std::uint64_t t = 0; t < kThreads; ++t) {
    threads.emplace_back([&, t] {
      for (std::uint64_t i = 0; i < kWrites; ++i) {
        std::lock_guard lock(order);
        opened.write(++last,
                     {windowed(t, epoch(0), {{t, i + 1}}), windowed(100 + i, epoch(1), {{t, 1}})});
        opened.store->counters();
        opened.store->backlog();
        opened.store->reserve_time(kT0 + static_cast<Nanos>(i));
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  ASSERT_TRUE(opened.watch->wait_committed(kThreads * kWrites));
  EXPECT_TRUE(opened.watch->ordered());
  opened.store.reset();
  Opened again = open_at(dir.path(), 2);
  Model model = model_of(again.recovered.state);
  EXPECT_EQ(model.size(), kThreads + kWrites);
  EXPECT_EQ(again.recovered.time_floor, kT0 + static_cast<Nanos>(kWrites) - 1);
  for (const auto& [id, cell] : model) {
    EXPECT_EQ(cell.total(), id.epoch == epoch(0) ? kWrites : kThreads);
  }
}

TEST(LmdbStore, MembersSurviveAndForgottenWritersGo) {
  TempDir dir;
  crdt::Member member{"us", "node-9"};
  {
    Opened opened = open_at(dir.path(), 1, eager());
    opened.write(1, {windowed(1, epoch(0), {{50, 1}}), windowed(1, epoch(50), {{51, 1}})});
    ASSERT_TRUE(opened.watch->wait_committed(1));
    ASSERT_TRUE(folded(opened));
    // Who a writer is may be learnt after its first slot.
    opened.write(2, {windowed(2, epoch(50), {{51, 1}})}, {{incarnation(51), member}});
    ASSERT_TRUE(opened.watch->wait_committed(2));
    ASSERT_TRUE(folded(opened));
    opened.store->expire(epoch(20).start);
    ASSERT_TRUE(eventually([&] { return opened.store->counters().dropped_generations == 1; }));
    opened.store->close(kT0);
  }
  EXPECT_EQ(tables_of(dir.path()).at("writers"), 2u);
  Opened again = open_at(dir.path(), 2);
  EXPECT_EQ(again.recovered.state.members,
            (std::map<crdt::Incarnation, crdt::Member>{{incarnation(51), member}}));
  again.store->close(kT0);
  EXPECT_EQ(tables_of(dir.path()).at("writers"), 1u);
  EXPECT_EQ(open_at(dir.path(), 3).recovered.state.cells.size(), 2u);
}

TEST(LmdbStore, OneLargeWriteIsSplitAndWhole) {
  TempDir dir;
  Opened opened = open_at(dir.path(), 1);
  crdt::Delta delta;
  for (std::uint64_t i = 0; i < 20'000; ++i) {
    delta.cells.push_back(windowed(i, epoch(0), {{1, i + 1}}));
  }
  Model model = model_of(delta);
  opened.store->append({1, std::move(delta)});
  ASSERT_TRUE(opened.watch->wait_committed(1));
  StoreCounters counters = opened.store->counters();
  EXPECT_EQ(counters.commits, 1u);
  EXPECT_GE(counters.records, 20u);
  EXPECT_GT(counters.bytes, 20'000u * 17);
  EXPECT_GT(counters.map_used_bytes, counters.bytes);
  EXPECT_GT(counters.last_commit_time, 0);
  opened.store.reset();
  EXPECT_TRUE(same(model_of(open_at(dir.path(), 2).recovered.state), model));
}

/// Holds the writer in front of a commit.
class Gate {
 public:
  LmdbHooks hooks() {
    return {[this] {
              std::unique_lock lock(mutex_);
              ++arrived_;
              changed_.notify_all();
              changed_.wait(lock, [this] { return open_; });
              return 0;
            },
            {}};
  }
  void wait_arrived() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return arrived_ > 0; });
  }
  void open() {
    std::lock_guard lock(mutex_);
    open_ = true;
    changed_.notify_all();
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  int arrived_ = 0;
  bool open_ = false;
};

TEST(LmdbStore, SlowDiskShowsABacklogAndGroupsWrites) {
  TempDir dir;
  Gate gate;
  Opened opened = open_at(dir.path(), 1, lazy(), gate.hooks());
  opened.write(1, {windowed(1, epoch(0), {{1, 1}})});
  gate.wait_arrived();
  for (std::uint64_t id = 2; id <= 1000; ++id) {
    opened.write(id, {windowed(id % 10, epoch(0), {{1, id}})});
  }
  EXPECT_EQ(opened.store->backlog(), 1000u);
  EXPECT_EQ(opened.watch->committed(), 0u);
  gate.open();
  ASSERT_TRUE(opened.watch->wait_committed(1000));
  EXPECT_TRUE(eventually([&] { return opened.store->backlog() == 0; }));
  EXPECT_EQ(opened.store->counters().commits, 2u);
}

TEST(LmdbStore, FailedSyncAcknowledgesNothingAfter) {
  for (bool unknown : {false, true}) {
    TempDir dir;
    std::atomic<int> commits{0};
    auto fault = [&] { return ++commits == 4 ? EIO : 0; };
    LmdbHooks hooks;
    (unknown ? hooks.after_commit : hooks.before_commit) = fault;
    Opened opened = open_at(dir.path(), 1, lazy(), hooks);
    for (std::uint64_t id = 1; id <= 3; ++id) {
      opened.write(id, {windowed(id, epoch(0), {{1, id}})});
      ASSERT_TRUE(opened.watch->wait_committed(id));
    }
    opened.write(4, {windowed(4, epoch(0), {{1, 4}})});
    ASSERT_TRUE(opened.watch->wait_failed());
    opened.write(5, {windowed(5, epoch(0), {{1, 5}})});
    opened.store->reserve_time(kT0 + kDay);
    opened.store->expire(kT0 + kDay);
    EXPECT_EQ(opened.store->backlog(), 0u);
    opened.store->close(kT0 + 1);
    EXPECT_EQ(opened.watch->committed(), 3u);
    EXPECT_TRUE(opened.watch->ordered());
    ASSERT_EQ(opened.watch->failures().size(), 1u);
    EXPECT_THAT(opened.watch->failures()[0], HasSubstr(dir.path()));
    EXPECT_THAT(opened.watch->failures()[0], HasSubstr("Input/output error"));
    Opened again = open_at(dir.path(), 2);
    EXPECT_FALSE(again.recovered.clean);
    EXPECT_EQ(again.recovered.time_floor, kT0);  // of the first boot
    EXPECT_EQ(again.recovered.state.cells.size(), unknown ? 4u : 3u);
  }
}

TEST(LmdbStore, AdoptsAnotherIncarnationOnce) {
  TempDir dir;
  {
    Opened opened = open_at(dir.path(), 1);
    std::string error;
    EXPECT_TRUE(opened.store->adopt(boot_id(2), kT0, error)) << error;
    EXPECT_FALSE(opened.store->adopt(boot_id(1), kT0, error));
    EXPECT_THAT(error, HasSubstr("used before"));
    EXPECT_FALSE(opened.store->adopt(boot_id(2), kT0, error));
    opened.write(1, {windowed(1, epoch(0), {{1, 1}})});
    ASSERT_TRUE(opened.watch->wait_committed(1));
  }
  Opened again = open_at(dir.path(), 3);
  EXPECT_EQ(again.recovered.incarnations, (std::vector<crdt::Incarnation>{boot_id(1), boot_id(2)}));
}

TEST(LmdbStore, AFailedStoreAdoptsNothing) {
  TempDir dir;
  LmdbHooks hooks;
  hooks.before_commit = [] { return EIO; };
  Opened opened = open_at(dir.path(), 1, lazy(), hooks);
  std::string error;
  EXPECT_FALSE(opened.store->adopt(boot_id(2), kT0, error));
  EXPECT_THAT(error, HasSubstr("failed"));
  ASSERT_TRUE(opened.watch->wait_failed());
  EXPECT_FALSE(opened.store->adopt(boot_id(3), kT0, error));
}

TEST(LmdbStore, FailedFoldLosesNothing) {
  TempDir dir;
  std::atomic<bool> failing{false};
  LmdbHooks hooks;
  hooks.before_commit = [&] { return failing ? ENOSPC : 0; };
  LmdbTuning tuning = lazy();
  tuning.fold_records = 10;
  Opened opened = open_at(dir.path(), 1, tuning, hooks);
  Model model;
  for (std::uint64_t id = 1; id < 10; ++id) {
    crdt::Delta delta{{windowed(id, epoch(0), {{1, id}})}, {}};
    join_into(model, delta);
    opened.store->append({id, delta});
    ASSERT_TRUE(opened.watch->wait_committed(id));
  }
  failing = true;
  opened.write(10, {windowed(10, epoch(0), {{1, 10}})});
  ASSERT_TRUE(opened.watch->wait_failed());
  EXPECT_EQ(opened.watch->committed(), 9u);
  EXPECT_THAT(opened.watch->failures()[0], HasSubstr("No space left"));
  opened.store->close(kT0);
  EXPECT_TRUE(same(model_of(open_at(dir.path(), 2).recovered.state), model));

  // The same with the write let through and the fold behind it stopped.
  TempDir other;
  std::atomic<int> commits{0};
  hooks.before_commit = [&] { return ++commits == 2 ? EIO : 0; };
  Opened second = open_at(other.path(), 1, eager(), hooks);
  second.write(1, {windowed(1, epoch(0), {{1, 1}})});
  ASSERT_TRUE(second.watch->wait_failed());
  EXPECT_EQ(second.watch->committed(), 1u);
  second.store->close(kT0);
  EXPECT_EQ(open_at(other.path(), 2).recovered.state.cells.size(), 1u);
}

TEST(LmdbStore, MalformedCellsAreNeverAcknowledged) {
  TempDir dir;
  Opened opened = open_at(dir.path(), 1);
  opened.write(1, {windowed(1, epoch(0), {{1, 1}})});
  ASSERT_TRUE(opened.watch->wait_committed(1));
  crdt::Cell bad = windowed(2, {5, 5}, {{1, 1}});
  ASSERT_FALSE(crdt::valid(bad));
  opened.write(2, {bad});
  ASSERT_TRUE(opened.watch->wait_failed());
  opened.store->close(kT0);
  EXPECT_EQ(opened.watch->committed(), 1u);
  EXPECT_EQ(open_at(dir.path(), 2).recovered.state.cells.size(), 1u);

  Opened named = open_at(dir.path(), 3);
  named.write(1, {windowed(1, epoch(0), {{1, 1}})},
              {{incarnation(1), {std::string(5000, 'x'), "node"}}});
  ASSERT_TRUE(named.watch->wait_failed());
  named.store->close(kT0);
  EXPECT_TRUE(open_at(dir.path(), 4).good);
}

/// Appends until the store fails; returns the model of what was acknowledged.
Model fill(Opened& opened, std::uint64_t limit) {
  std::vector<crdt::Delta> deltas;
  for (std::uint64_t id = 1; id <= limit && opened.watch->failures().empty(); ++id) {
    crdt::Delta delta;
    for (std::uint64_t i = 0; i < 500; ++i) {
      delta.cells.push_back(windowed(id * 1000 + i, epoch(0), {{1, id}}));
    }
    deltas.push_back(delta);
    opened.store->append({id, std::move(delta)});
    eventually([&] { return opened.store->backlog() < 4; });
  }
  EXPECT_TRUE(opened.watch->wait_failed());
  opened.store->close(kT0);
  Model model;
  for (std::size_t i = 0; i < opened.watch->committed(); ++i) join_into(model, deltas[i]);
  return model;
}

TEST(LmdbStore, FullMapKeepsWhatWasCommitted) {
  for (bool fold : {false, true}) {
    TempDir dir;
    LmdbOptions options = options_for(dir.path());
    options.map_bytes = 4u << 20;
    Opened opened = open_with(options, 1, fold ? eager() : lazy());
    ASSERT_TRUE(opened.good) << opened.error;
    Model model = fill(opened, 2000);
    EXPECT_GE(model.size(), 500u);
    ASSERT_EQ(opened.watch->failures().size(), 1u);
    EXPECT_THAT(opened.watch->failures()[0], HasSubstr("MDB_MAP_FULL"));
    EXPECT_TRUE(opened.watch->ordered());
    // It opens with the same map and is whole; with a larger one it goes on.
    {
      Opened again = open_with(options, 2);
      ASSERT_TRUE(again.good) << again.error;
      EXPECT_TRUE(same(model_of(again.recovered.state), model));
    }
    options.map_bytes = 256u << 20;
    Opened larger = open_with(options, 3, eager());
    ASSERT_TRUE(larger.good) << larger.error;
    EXPECT_TRUE(same(model_of(larger.recovered.state), model));
    EXPECT_TRUE(folded(larger));
    larger.write(1, {windowed(5, epoch(200), {{1, 1}})});
    EXPECT_TRUE(larger.watch->wait_committed(1));
    larger.store->close(kT0);
  }
}

/// As nodes tune it: the same cells again and again, more than the map's size in all.
TEST(LmdbStore, ASmallMapIsFoldedBeforeTheLogFillsIt) {
  TempDir dir;
  LmdbOptions options = options_for(dir.path());
  options.map_bytes = 8u << 20;
  Opened opened;
  opened.store = make_lmdb_store(options);
  ASSERT_TRUE(
      opened.store->open(boot_id(1), kT0, opened.watch->events(), opened.recovered, opened.error));
  Model model;
  for (crdt::WriteId id = 1; id <= 600; ++id) {
    std::vector<crdt::Cell> cells;
    for (std::uint64_t series = 0; series < 1000; ++series) {
      cells.push_back(windowed(series, epoch(100), {{1, id}}));
    }
    join_into(model, {cells, {}});
    opened.write(id, std::move(cells));
    ASSERT_TRUE(opened.watch->wait_committed(id));
  }
  EXPECT_GT(opened.store->counters().bytes, options.map_bytes);
  opened.store->close(kT0);
  Opened again = open_with(options, 2);
  EXPECT_TRUE(same(model_of(again.recovered.state), model));
}

TEST(LmdbStore, ARealWriteErrorKeepsWhatWasCommitted) {
  TempDir dir;
  ::signal(SIGXFSZ, SIG_IGN);
  struct rlimit before {};
  ASSERT_EQ(::getrlimit(RLIMIT_FSIZE, &before), 0);
  struct rlimit small = before;
  small.rlim_cur = 1u << 20;
  Opened opened = open_at(dir.path(), 1);
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &small), 0);
  Model model = fill(opened, 2000);
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &before), 0);
  EXPECT_GE(model.size(), 500u);
  EXPECT_EQ(opened.watch->failures().size(), 1u);
  EXPECT_TRUE(opened.watch->ordered());
  Opened again = open_at(dir.path(), 2);
  EXPECT_TRUE(same(model_of(again.recovered.state), model));
}

/// A store, and what it says when it is opened again.
struct Reopened {
  explicit Reopened(const std::string& path, LmdbHooks hooks = {})
      : store(make_lmdb_store(options_for(path), lazy(), std::move(hooks))) {
    StoreEvents events = watch.events();
    events.opened = [this](std::shared_ptr<Recovered> found) {
      opened.set_value(std::move(found));
    };
    Recovered recovered;
    std::string error;
    EXPECT_TRUE(store->open(boot_id(1), kT0, std::move(events), recovered, error)) << error;
  }
  std::shared_ptr<Recovered> again(std::uint64_t boot) {
    store->reopen(boot_id(boot), kT0 + 1);
    std::future<std::shared_ptr<Recovered>> told = opened.get_future();
    if (told.wait_for(std::chrono::seconds(20)) != std::future_status::ready) return nullptr;
    return told.get();
  }
  void write(crdt::WriteId id) { store->append({id, {{windowed(id, epoch(0), {{1, id}})}, {}}}); }
  Watch watch;
  std::promise<std::shared_ptr<Recovered>> opened;
  std::unique_ptr<Store> store;
};

TEST(LmdbStore, AFullDiskIsCalledSoAndIsOpenedAgain) {
  TempDir dir;
  std::atomic<bool> full{false};
  LmdbHooks hooks;
  hooks.before_commit = [&] { return full ? ENOSPC : 0; };
  Reopened node(dir.path(), hooks);
  node.write(1);
  ASSERT_TRUE(node.watch.wait_committed(1));
  full = true;
  node.write(2);
  ASSERT_TRUE(node.watch.wait_failed());
  EXPECT_THAT(node.watch.failures()[0], HasSubstr(dir.path()));
  EXPECT_THAT(node.watch.failures()[0], HasSubstr("no space left on the disk"));
  node.write(3);
  full = false;
  const std::shared_ptr<Recovered> found = node.again(2);
  ASSERT_NE(found, nullptr);
  EXPECT_EQ(found->state.cells.size(), 1u);
  EXPECT_EQ(found->incarnations, std::vector<crdt::Incarnation>{boot_id(1)});
  node.store->append({4, {{windowed(4, epoch(0), {{1, 4}})}, {}}});
  EXPECT_TRUE(eventually([&] { return node.watch.committed() == 4; }));
  node.store->close(kT0 + 2);
  Opened last = open_at(dir.path(), 3);
  EXPECT_TRUE(last.recovered.clean);
  EXPECT_EQ(last.recovered.state.cells.size(), 2u);
}

TEST(LmdbStore, AStoreThatIsDeletedOrReplacedFailsAndIsMadeAnew) {
  for (bool replaced : {false, true}) {
    TempDir dir;
    const std::string path = dir / "store";
    Reopened node(path);
    node.write(1);
    ASSERT_TRUE(node.watch.wait_committed(1));
    if (replaced) {
      std::filesystem::copy(path, dir / "copy", std::filesystem::copy_options::recursive);
      std::filesystem::rename(path, dir / "old");
      std::filesystem::rename(dir / "copy", path);
    } else {
      std::filesystem::remove_all(path);
    }
    ASSERT_TRUE(node.watch.wait_failed());
    EXPECT_THAT(node.watch.failures()[0], HasSubstr(path + "/data.mdb"));
    EXPECT_THAT(node.watch.failures()[0], HasSubstr("deleted or replaced"));
    const std::shared_ptr<Recovered> found = node.again(2);
    ASSERT_NE(found, nullptr);
    EXPECT_EQ(found->state.cells.size(), replaced ? 1u : 0u);
    node.store->append({2, {{windowed(2, epoch(0), {{1, 2}})}, {}}});
    EXPECT_TRUE(eventually([&] { return node.watch.committed() == 2; }));
    node.store->close(kT0 + 2);
    Opened last = open_at(path, 3);
    EXPECT_EQ(last.recovered.state.cells.size(), replaced ? 2u : 1u);
  }
}

TEST(LmdbStore, RefusesAnotherIdentity) {
  TempDir dir;
  open_at(dir.path(), 1).store->close(kT0);
  LmdbOptions cluster = options_for(dir.path());
  cluster.cluster = "other";
  LmdbOptions region = options_for(dir.path());
  region.self.region = "other";
  LmdbOptions node = options_for(dir.path());
  node.self.node = "other";
  for (const LmdbOptions& options : {cluster, region, node}) {
    Opened refused = open_with(options, 2);
    EXPECT_FALSE(refused.good);
    EXPECT_THAT(refused.error, HasSubstr(dir.path()));
    EXPECT_THAT(refused.error, HasSubstr("belongs to node 'node-1'"));
    EXPECT_THAT(refused.error, HasSubstr("'other'"));
  }
  // None of them took the incarnation.
  EXPECT_TRUE(open_at(dir.path(), 2).recovered.clean);
}

TEST(LmdbStore, RefusesANewerFormat) {
  TempDir dir;
  open_at(dir.path(), 1).store->close(kT0);
  std::string marker = read_file(dir / "weir-store");
  write_file(dir / "weir-store", "weir store, format 2\n");
  Opened refused = open_with(options_for(dir.path()), 2);
  EXPECT_FALSE(refused.good);
  EXPECT_THAT(refused.error, HasSubstr(dir.path()));
  EXPECT_THAT(refused.error, HasSubstr("has format 2, this program reads format 1"));
  write_file(dir / "weir-store", marker);

  Bytes value;
  start_value(value);
  put_text(value, "weir store");
  put_u32(value, 7);
  put_text(value, "whatever a later format adds");
  seal(view_of("format"), value);
  put_raw(dir.path(), "meta", view_of("format"), value);
  Opened newer = open_with(options_for(dir.path()), 2);
  EXPECT_FALSE(newer.good);
  EXPECT_THAT(newer.error, HasSubstr(dir.path()));
  EXPECT_THAT(newer.error, HasSubstr("has format 7, this program reads format 1"));
}

TEST(LmdbStore, RefusesWhatIsNoStore) {
  TempDir dir;
  put_raw(dir.path(), "meat", view_of("a"), view_of("b"));
  Opened foreign = open_with(options_for(dir.path()), 1);
  EXPECT_FALSE(foreign.good);
  EXPECT_THAT(foreign.error, HasSubstr("no store"));

  TempDir unknown;
  open_at(unknown.path(), 1).store->close(kT0);
  put_raw(unknown.path(), "surprise", view_of("a"), view_of("b"));
  Opened refused = open_with(options_for(unknown.path()), 2);
  EXPECT_FALSE(refused.good);
  EXPECT_THAT(refused.error, HasSubstr("unknown table"));

  TempDir file;
  write_file(file / "plain", "text");
  EXPECT_FALSE(open_with(options_for(file / "plain"), 1).good);
  EXPECT_FALSE(open_with(options_for(""), 1).good);
  EXPECT_FALSE(open_with(options_for("/proc/weir-cannot-be-here"), 1).good);
}

/// A store with something of everything in it: tables, buckets, a log, free pages.
Model make_rich(const std::string& path) {
  Model model;
  for (std::uint64_t boot = 1; boot <= 2; ++boot) {
    Opened opened = open_at(path, boot, boot == 1 ? eager() : lazy());
    for (std::uint64_t id = 1; id <= 4; ++id) {
      crdt::Delta delta;
      for (std::uint64_t i = 0; i < 400; ++i) {
        delta.cells.push_back(windowed(i, epoch(static_cast<std::int64_t>(i % 5)), {{id, id}}));
        delta.cells.push_back(bucket(i, kT0, id, boot, kT0, kT0 + kMinute));
      }
      delta.members[incarnation(id)] = {"eu", "n" + std::to_string(id)};
      join_into(model, delta);
      opened.store->append({id, delta});
      EXPECT_TRUE(opened.watch->wait_committed(id));
    }
    if (boot == 1) {
      EXPECT_TRUE(folded(opened));
    }
    opened.store->close(kT0);
  }
  return model;
}

TEST(LmdbStore, ADamagedFileIsRefusedOrHarmless) {
  TempDir dir;
  Model model = make_rich(dir.path());
  const std::string data = dir / "data.mdb";
  const std::string good = read_file(data);
  std::string error;
  ASSERT_TRUE(check_lmdb_file(data, error)) << error;
  std::uint64_t boot = 100;
  int refused = 0;
  int harmless = 0;
  auto attempt = [&](const std::string& content, const std::string& what) {
    SCOPED_TRACE(what);
    write_file(data, content);
    Opened opened = open_with(options_for(dir.path()), ++boot);
    if (opened.good) {
      // The bytes were of no account: then everything must still be there.
      EXPECT_TRUE(same(model_of(opened.recovered.state), model));
      EXPECT_EQ(opened.recovered.incarnations.size(), 2u);
      EXPECT_EQ(opened.recovered.time_floor, kT0);
      ++harmless;
    } else {
      EXPECT_THAT(opened.error, HasSubstr(dir.path()));
      ++refused;
    }
    return opened.good;
  };
  EXPECT_TRUE(attempt(good, "untouched"));
  for (std::size_t size : {std::size_t{0}, std::size_t{1}, std::size_t{100}, std::size_t{4096},
                           std::size_t{5000}, std::size_t{8192}, good.size() / 2}) {
    EXPECT_FALSE(attempt(good.substr(0, size), "cut to " + std::to_string(size)));
  }
  for (std::size_t page = 0; page < 2; ++page) {
    std::string content = good;
    content.replace(page * 4096, 4096, std::string(4096, '\xA5'));
    EXPECT_FALSE(attempt(content, "header page " + std::to_string(page)));
  }
  std::seed_seq seeds{20240101};
  std::mt19937_64 random(seeds);
  for (int round = 0; round < 400; ++round) {
    std::string content = good;
    std::size_t size = 1;
    switch (round % 4) {
      case 1:
        size = 8;
        break;
      case 2:
        size = 64;
        break;
      case 3:
        size = 4096;
        break;
    }
    // Headers and page starts, where it hurts most, as often as anywhere.
    std::size_t at = random() % (content.size() - size);
    if (round % 3 == 0) at = random() % (2 * 4096 - std::min<std::size_t>(size, 4096));
    if (round % 3 == 1) at = at / 4096 * 4096 + random() % 16;
    for (std::size_t i = 0; i < size; ++i) content[at + i] = static_cast<char>(random());
    attempt(content, fmt::format("round {}: {} bytes at {}", round, size, at));
  }
  for (int round = 0; round < 60; ++round) {
    // A page in another's place, as a lost or misdirected write leaves it.
    std::string content = good;
    std::size_t pages = good.size() / 4096;
    std::size_t from = random() % pages;
    std::size_t to = random() % pages;
    content.replace(to * 4096, 4096, good.substr(from * 4096, 4096));
    attempt(content, fmt::format("page {} written over {}", from, to));
  }
  EXPECT_GT(refused, 150);
  EXPECT_GT(harmless, 20);
}

TEST(LmdbStore, AFlippedBitInALogRecordIsRefused) {
  TempDir dir;
  {
    Opened opened = open_at(dir.path(), 1);
    crdt::Delta delta;
    for (std::uint64_t i = 0; i < 900; ++i) {
      delta.cells.push_back(windowed(0x0123456789ABCDEF, epoch(static_cast<std::int64_t>(i)),
                                     {{1, 0x5555555555555555}}));
    }
    opened.store->append({1, delta});
    ASSERT_TRUE(opened.watch->wait_committed(1));
  }
  std::string content = read_file(dir / "data.mdb");
  // The series as the codec writes it, in the middle of the record.
  std::string series(8, '\0');
  std::uint64_t low = 0x0123456789ABCDEF;
  std::memcpy(series.data(), &low, 8);
  std::size_t at = content.find(series, content.find(series) + 10'000);
  ASSERT_NE(at, std::string::npos);
  content[at] = static_cast<char>(content[at] ^ 1);
  write_file(dir / "data.mdb", content);
  Opened refused = open_with(options_for(dir.path()), 2);
  EXPECT_FALSE(refused.good);
  EXPECT_THAT(refused.error, HasSubstr("log record 1 has a wrong checksum"));
  EXPECT_THAT(refused.error, HasSubstr(dir / "data.mdb"));
}

TEST(LmdbStore, AMissingDataFileIsRefused) {
  TempDir dir;
  open_at(dir.path(), 1).store->close(kT0);
  std::string marker = read_file(dir / "weir-store");
  ASSERT_EQ(marker, "weir store, format 1\n");
  std::filesystem::rename(dir / "data.mdb", dir / "elsewhere");
  Opened refused = open_with(options_for(dir.path()), 2);
  EXPECT_FALSE(refused.good);
  EXPECT_THAT(refused.error, HasSubstr("missing"));
  std::filesystem::rename(dir / "elsewhere", dir / "data.mdb");
  // A crash before the marker was written, or an operator who deleted it: the data decides.
  std::filesystem::remove(dir / "weir-store");
  Opened opened = open_at(dir.path(), 2);
  EXPECT_EQ(opened.recovered.incarnations.size(), 1u);
  opened.store->close(kT0);
  EXPECT_EQ(read_file(dir / "weir-store"), marker);
  write_file(dir / "weir-store", "something else");
  EXPECT_FALSE(open_with(options_for(dir.path()), 3).good);
}

TEST(LmdbStore, LeftoversOfACrashWhileItWasMadeAreNoStore) {
  TempDir dir;
  std::filesystem::create_directories(dir / "new");
  write_file(dir / "new/data.mdb", std::string(100, 'x'));
  write_file(dir / "weir-store", "");
  Opened opened = open_at(dir.path(), 1);
  EXPECT_TRUE(opened.recovered.state.empty());
  EXPECT_FALSE(std::filesystem::exists(dir / "new"));
}

TEST(LmdbStore, RefusesASecondOpening) {
  TempDir dir;
  Opened first = open_at(dir.path(), 1);
  Opened second = open_with(options_for(dir.path()), 2);
  EXPECT_FALSE(second.good);
  EXPECT_THAT(second.error, HasSubstr("another process"));
  EXPECT_THAT(second.error, HasSubstr(dir.path()));
  Recovered again;
  EXPECT_FALSE(first.store->open(boot_id(3), kT0, {}, again, second.error));
  first.write(1, {windowed(1, epoch(0), {{1, 1}})});
  EXPECT_TRUE(first.watch->wait_committed(1));
  first.store->close(kT0);
  EXPECT_TRUE(open_at(dir.path(), 2).good);
}

TEST(LmdbStore, RefusesAStoreThatAnotherProcessUses) {
  TempDir dir;
  int ready[2];
  ASSERT_EQ(::pipe(ready), 0);
  pid_t child = ::fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    Opened opened = open_with(options_for(dir.path()), 1);
    char done = opened.good ? '1' : '0';
    if (::write(ready[1], &done, 1) != 1) ::_exit(1);
    for (;;) ::pause();
  }
  char done = 0;
  ASSERT_EQ(::read(ready[0], &done, 1), 1);
  EXPECT_EQ(done, '1');
  Opened refused = open_with(options_for(dir.path()), 2);
  EXPECT_FALSE(refused.good);
  EXPECT_THAT(refused.error, HasSubstr("another process"));
  ::kill(child, SIGKILL);
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  ::close(ready[0]);
  ::close(ready[1]);
  Opened opened = open_at(dir.path(), 2);
  EXPECT_EQ(opened.recovered.incarnations, std::vector{boot_id(1)});
  EXPECT_FALSE(opened.recovered.clean);
}

TEST(LmdbStore, ClearsReadersThatDied) {
  TempDir dir;
  LmdbTuning tuning = lazy();
  tuning.reader_check_interval = std::chrono::milliseconds(5);
  Opened opened = open_at(dir.path(), 1);
  opened.store->close(kT0);
  int ready[2];
  ASSERT_EQ(::pipe(ready), 0);
  pid_t child = ::fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    // A reader, as mdb_copy is, once the store runs; it never ends its transaction.
    char go = 0;
    if (::read(ready[0], &go, 1) != 1) ::_exit(1);
    MDB_env* env = nullptr;
    MDB_txn* txn = nullptr;
    mdb_env_create(&env);
    if (mdb_env_open(env, dir.path().c_str(), MDB_RDONLY, 0600) != 0) ::_exit(1);
    if (mdb_txn_begin(env, nullptr, MDB_RDONLY, &txn) != 0) ::_exit(1);
    ::_exit(0);
  }
  Opened again = open_at(dir.path(), 2, tuning);
  ASSERT_EQ(::write(ready[1], "g", 1), 1);
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  ASSERT_EQ(status, 0);
  EXPECT_TRUE(eventually([&] { return again.store->counters().stale_readers == 1; }));
  ::close(ready[0]);
  ::close(ready[1]);
}

}  // namespace
}  // namespace weir::storage::testing
