#include <weir/storage/disk.h>

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <limits>
#include <system_error>

#include <fmt/format.h>

#include <weir/crdt/codec.h>
#include <weir/crdt/escrow.h>
#include <weir/storage/lmdb_check.h>
#include <weir/storage/lmdb_store.h>

namespace weir::storage {

namespace {

namespace fs = std::filesystem;

constexpr mode_t kFileMode = 0640;
constexpr const char* kMarker = "weir-store";
constexpr const char* kData = "data.mdb";
constexpr std::string_view kMarkerText = "weir store, format ";
constexpr std::string_view kFormatMagic = "weir store";
constexpr MDB_dbi kMaxTables = 8192;
constexpr std::size_t kStepTables = 1024;
/// A file that has filled its map is still opened, with this much more: its state can then be read,
/// and expiry can free it.
constexpr std::uint64_t kHeadroom = 4u << 20;

std::string errno_text() {
  return std::strerror(errno);
}

void sync_path(const std::string& path) {
  File handle(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
  if (handle.get() < 0 || ::fsync(handle.get()) != 0) {
    throw StoreError(fmt::format("{}: cannot sync: {}", path, errno_text()));
  }
}

MDB_dbi open_table(const Txn& txn, const char* name, unsigned flags) {
  MDB_dbi dbi = 0;
  int rc = mdb_dbi_open(txn.get(), name, flags, &dbi);
  if (rc != MDB_SUCCESS) check(rc, fmt::format("table {}", name != nullptr ? name : "of tables"));
  return dbi;
}

void put_sealed(Txn& txn, MDB_dbi dbi, std::string_view key, Bytes value) {
  seal(view_of(key), value);
  txn.put(dbi, view_of(key), value);
}

constexpr std::string_view kFormatKey = "format";
constexpr std::string_view kIdentityKey = "identity";
constexpr std::string_view kTimeKey = "time";
constexpr std::string_view kLivedKey = "lived";  // absent: of a store that was made before
constexpr std::string_view kLostKey = "lost";    // absent: no window is

constexpr std::string_view kBootPrefix = "boot/";

Bytes boot_key(std::uint64_t ordinal) {
  Bytes key;
  View prefix = view_of(kBootPrefix);
  key.assign(prefix.begin(), prefix.end());
  put_big64(key, ordinal);
  return key;
}

}  // namespace

int try_to_write(const std::string& directory) {
  // About as much as a commit writes at once.
  const std::vector<char> bytes(1u << 20, 'w');
  const std::string path = directory + "/probe";
  File file(::open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, kFileMode));
  if (file.get() < 0) return errno;
  int error = 0;
  for (std::size_t done = 0; error == 0 && done < bytes.size();) {
    const ssize_t written = ::write(file.get(), bytes.data() + done, bytes.size() - done);
    if (written < 0 && errno != EINTR) error = errno;
    if (written > 0) done += static_cast<std::size_t>(written);
  }
  if (error == 0 && ::fsync(file.get()) != 0) error = errno;
  ::unlink(path.c_str());
  return error;
}

File::~File() {
  if (fd_ >= 0) ::close(fd_);
}

Disk::Disk(LmdbOptions options, std::size_t max_handles)
    : options_(std::move(options)),
      max_handles_(max_handles),
      hash_(options_.seed),
      taken_(0, hash_),
      writers_(0, hash_),
      used_(0, hash_),
      gathered_(options_.seed) {}

Disk::~Disk() = default;

void Disk::damaged(const std::string& what) const {
  throw StoreError(fmt::format("{} is damaged: {}", file(kData), what));
}

void Disk::make_directory() {
  std::error_code failure;
  fs::path path = fs::absolute(options_.path, failure);
  if (options_.path.empty() || failure) throw StoreError("the store's path is empty");
  std::vector<fs::path> parents;
  for (fs::path at = path; !fs::exists(at, failure) && at.has_relative_path();) {
    at = at.parent_path();
    parents.push_back(at);
  }
  const bool made = fs::create_directories(path, failure);
  if (!failure && made) fs::permissions(path, fs::perms::owner_all, failure);  // its owner's alone
  if (failure) throw StoreError(fmt::format("{}: {}", options_.path, failure.message()));
  for (const fs::path& parent : parents) sync_path(parent.string());
}

void Disk::lock() {
  std::string path = file(kMarker);
  marker_ = File(::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, kFileMode));
  if (marker_.get() < 0) throw StoreError(fmt::format("{}: {}", path, errno_text()));
  if (::flock(marker_.get(), LOCK_EX | LOCK_NB) != 0) {
    if (errno == EWOULDBLOCK) {
      throw StoreError(fmt::format("{} is locked: another process uses this store", path));
    }
    throw StoreError(fmt::format("{}: cannot lock: {}", path, errno_text()));
  }
}

/// Makes the first data file aside and moves it in place once it is whole and durable, so that a
/// crash leaves either no store or a good one.
void Disk::create_data() {
  std::string aside = file("new");
  std::error_code failure;
  fs::remove_all(aside, failure);
  if (!fs::create_directory(aside, failure)) {
    throw StoreError(fmt::format("{}: {}", aside, failure.message()));
  }
  {
    Env env;
    env.create();
    check(mdb_env_set_maxdbs(env.get(), 4), aside);
    check(mdb_env_set_mapsize(env.get(), kHeadroom), aside);
    check(mdb_env_open(env.get(), aside.c_str(), 0, kFileMode), aside);
    Txn txn(env.get(), 0);
    MDB_dbi meta = open_table(txn, "meta", MDB_CREATE);
    open_table(txn, "log", MDB_CREATE);
    open_table(txn, "writers", MDB_CREATE);
    Bytes format;
    start_value(format);
    put_text(format, kFormatMagic);
    put_u32(format, kFormatVersion);
    put_sealed(txn, meta, kFormatKey, std::move(format));
    Bytes identity;
    start_value(identity);
    put_text(identity, options_.cluster);
    put_text(identity, options_.self.region);
    put_text(identity, options_.self.node);
    put_sealed(txn, meta, kIdentityKey, std::move(identity));
    put_time(txn, 0, false);
    check(txn.commit(), aside);
  }
  fs::rename(aside + "/" + kData, file(kData), failure);
  if (failure) throw StoreError(fmt::format("{}: {}", file(kData), failure.message()));
  sync_path(options_.path);
  fs::remove_all(aside, failure);
}

/// At most TimeLived::kMost.
void Disk::put_ranges(Bytes& value, const std::vector<crdt::TimeRange>& ranges) {
  put_u8(value, static_cast<std::uint8_t>(ranges.size()));
  for (const crdt::TimeRange& range : ranges) {
    put_big64(value, static_cast<std::uint64_t>(range.from));
    put_big64(value, static_cast<std::uint64_t>(range.to));
  }
}

/// The marker says that there is a store: a data file that has gone missing is then noticed.
void Disk::write_marker() {
  std::string text = fmt::format("{}{}\n", kMarkerText, kFormatVersion);
  if (::ftruncate(marker_.get(), 0) != 0 ||
      ::pwrite(marker_.get(), text.data(), text.size(), 0) != static_cast<ssize_t>(text.size()) ||
      ::fsync(marker_.get()) != 0) {
    throw StoreError(fmt::format("{}: {}", file(kMarker), errno_text()));
  }
  sync_path(options_.path);
}

void Disk::start_env() {
  std::array<char, 64> content{};
  ssize_t size = ::pread(marker_.get(), content.data(), content.size(), 0);
  if (size < 0) throw StoreError(fmt::format("{}: {}", file(kMarker), errno_text()));
  std::string_view text(content.data(), static_cast<std::size_t>(size));
  bool marked = !text.empty();
  if (marked) {
    unsigned version = 0;
    if (std::sscanf(std::string(text).c_str(), "weir store, format %u", &version) != 1) {
      throw StoreError(fmt::format("{} is damaged: it does not name a format", file(kMarker)));
    }
    if (version != kFormatVersion) {
      throw StoreError(fmt::format("{}: the store has format {}, this program reads format {}",
                                   options_.path, version, kFormatVersion));
    }
  }
  std::error_code failure;
  std::uintmax_t bytes = fs::file_size(file(kData), failure);
  if (failure && failure != std::errc::no_such_file_or_directory) {
    throw StoreError(fmt::format("{}: {}", file(kData), failure.message()));
  }
  if (failure) {
    if (marked) damaged("it is missing, though there was a store here");
    create_data();
    bytes = fs::file_size(file(kData), failure);
    if (failure) throw StoreError(fmt::format("{}: {}", file(kData), failure.message()));
  }
  std::string error;
  if (!check_lmdb_file(file(kData), error)) throw StoreError(error);
  if (!marked) write_marker();

  auto page = static_cast<std::uint64_t>(::sysconf(_SC_PAGESIZE));
  std::uint64_t map = std::max<std::uint64_t>(options_.map_bytes, bytes + kHeadroom);
  map = (map + page - 1) / page * page;
  env_.create();
  check(mdb_env_set_maxdbs(env_.get(), kMaxTables), file(kData));
  check(mdb_env_set_mapsize(env_.get(), map), file(kData));
  // Without MDB_NOSYNC, MDB_NOMETASYNC and MDB_WRITEMAP: a commit is durable when it returns.
  check(mdb_env_open(env_.get(), options_.path.c_str(), MDB_NOTLS, kFileMode),
        fmt::format("cannot open {} with a map of {} bytes", file(kData), map));
}

void Disk::read_meta(const Txn& txn, Recovered& out) {
  MDB_dbi meta = 0;
  int rc = mdb_dbi_open(txn.get(), "meta", 0, &meta);
  if (rc == MDB_NOTFOUND) damaged("it holds no store");
  check(rc, file(kData));
  auto sealed = [&](std::string_view key) {
    std::optional<View> value = txn.get(meta, view_of(key));
    View content;
    if (!value || !unseal(view_of(key), *value, content)) {
      damaged(fmt::format("its record '{}' is missing or broken", key));
    }
    return RecordReader(content);
  };

  RecordReader format = sealed(kFormatKey);
  std::string magic = format.text();
  std::uint32_t version = format.u32();
  if (magic != kFormatMagic || !format.ok()) damaged("it holds no store");
  if (version != kFormatVersion) {
    throw StoreError(fmt::format("{}: the store has format {}, this program reads format {}",
                                 file(kData), version, kFormatVersion));
  }

  RecordReader identity = sealed(kIdentityKey);
  std::string cluster = identity.text();
  crdt::Member member{identity.text(), identity.text()};
  if (!identity.done()) damaged("its record 'identity' is broken");
  if (cluster != options_.cluster || member != options_.self) {
    throw StoreError(fmt::format(
        "{}: the store belongs to node '{}' of region '{}' in cluster '{}', not to node '{}' of "
        "region '{}' in cluster '{}'",
        options_.path, member.node, member.region, cluster, options_.self.node,
        options_.self.region, options_.cluster));
  }

  RecordReader time = sealed(kTimeKey);
  std::uint64_t floor = time.varint();
  out.clean = time.u8() != 0;
  if (!time.done() || floor > static_cast<std::uint64_t>(std::numeric_limits<Nanos>::max())) {
    damaged("its record 'time' is broken");
  }
  out.time_floor = static_cast<Nanos>(floor);

  read_lived(txn, meta, out);
  read_boots(txn, meta, out);
}

void Disk::read_lived(const Txn& txn, MDB_dbi meta, Recovered& out) {
  auto ranges = [&](std::string_view key, Nanos* first) {
    std::vector<crdt::TimeRange> read;
    std::optional<View> value = txn.get(meta, view_of(key));
    if (!value) return read;
    View content;
    bool good = unseal(view_of(key), *value, content);
    RecordReader from(content);
    if (good && first != nullptr) *first = static_cast<Nanos>(from.big64());
    if (good) read.resize(from.u8());
    for (crdt::TimeRange& range : read) {
      range.from = static_cast<Nanos>(from.big64());
      range.to = static_cast<Nanos>(from.big64());
    }
    if (!good || !from.done() || read.size() > TimeLived::kMost) {
      damaged(fmt::format("its record '{}' is broken", key));
    }
    return read;
  };
  lived_ = TimeLived(ranges(kLivedKey, nullptr), out.time_floor);
  out.lost.lived = ranges(kLostKey, &out.lost.ended);
}

void Disk::read_boots(const Txn& txn, MDB_dbi meta, Recovered& out) {
  Cursor cursor(txn, meta);
  Bytes from = boot_key(0);
  for (bool more = cursor.seek(from); more; more = cursor.move(MDB_NEXT)) {
    std::string_view key = text_of(cursor.key());
    if (!key.starts_with(kBootPrefix)) break;
    RecordReader ordinal(cursor.key().subspan(kBootPrefix.size()));
    boots_ = ordinal.big64() + 1;
    View content;
    if (!ordinal.done() || !unseal(cursor.key(), cursor.value(), content)) {
      damaged("a boot's record is broken");
    }
    RecordReader boot(content);
    crdt::Incarnation incarnation{boot.big64(), boot.big64()};
    boot.varint();
    if (!boot.done() || !incarnation) damaged("a boot's record is broken");
    out.incarnations.push_back(incarnation);
  }
}

void Disk::read_writers(const Txn& txn, MDB_dbi dbi) {
  Cursor cursor(txn, dbi);
  while (cursor.move(MDB_NEXT)) {
    RecordReader key(cursor.key());
    Writer entry;
    entry.number = key.big32();
    View content;
    if (!key.done() || !unseal(cursor.key(), cursor.value(), content)) {
      damaged("a writer's record is broken");
    }
    RecordReader value(content);
    crdt::Incarnation incarnation{value.big64(), value.big64()};
    entry.named = value.u8() == 1;
    if (entry.named) {
      crdt::Member member;
      member.region = value.text();
      member.node = value.text();
      members_.emplace(incarnation, std::move(member));
    }
    if (!value.done() || !incarnation || !writers_.emplace(incarnation, entry).second) {
      damaged("a writer's record is broken");
    }
    by_number_.emplace(entry.number, incarnation);
    next_writer_ = entry.number + 1;
  }
}

void Disk::read_log(const Txn& txn, Cells& cells) {
  Cursor cursor(txn, open_table(txn, "log", 0));
  bool first = true;
  while (cursor.move(MDB_NEXT)) {
    RecordReader key(cursor.key());
    std::uint64_t number = key.big64();
    View content;
    if (!key.done() || number == 0 || (!first && number != log_.last + 1)) {
      damaged("its log has a gap");
    }
    if (!unseal(cursor.key(), cursor.value(), content)) {
      damaged(fmt::format("log record {} has a wrong checksum", number));
    }
    crdt::Delta delta;
    std::string error;
    if (!crdt::decode(content, delta, error)) {
      damaged(fmt::format("log record {}: {}", number, error));
    }
    if (first) log_.first = number;
    first = false;
    log_.last = number;
    log_.bytes += cursor.value().size();
    for (auto& [incarnation, member] : delta.members) {
      members_.emplace(incarnation, std::move(member));
    }
    for (crdt::Cell& cell : delta.cells) {
      for (const crdt::Slot& slot : cell.slots) used_.insert(slot.id.writer);
      auto [at, added] = cells.try_emplace(cell.id);
      if (added) {
        at->second = std::move(cell);
      } else {
        crdt::join(at->second, cell);
      }
    }
  }
}

void Disk::read_table(const Txn& txn, const crdt::Generation& generation, Cells& fresh,
                      crdt::Delta& out) {
  Cursor cursor(txn, open_table(txn, table_name(generation).c_str(), 0));
  while (cursor.move(MDB_NEXT)) {
    crdt::Cell cell = unpack(cursor.key(), cursor.value(), generation);
    if (!fresh.empty()) {
      if (auto at = fresh.find(cell.id); at != fresh.end()) {
        crdt::join(cell, at->second);
        fresh.erase(at);
      }
    }
    out.cells.push_back(std::move(cell));
  }
}

Recovered Disk::open(const crdt::Incarnation& fresh, Nanos now) {
  if (!fresh) throw StoreError("the boot's incarnation is zero");
  make_directory();
  lock();
  start_env();
  Recovered out;
  read_all(out);
  if (used_.contains(fresh) || writers_.contains(fresh) || members_.contains(fresh) ||
      std::find(out.incarnations.begin(), out.incarnations.end(), fresh) !=
          out.incarnations.end()) {
    throw StoreError(
        fmt::format("{}: incarnation {} was used before", options_.path, crdt::to_string(fresh)));
  }

  Txn txn(env_.get(), 0);
  meta_ = open_table(txn, "meta", 0);
  log_dbi_ = open_table(txn, "log", 0);
  writers_dbi_ = open_table(txn, "writers", 0);
  forget_unused_writers(txn);
  used_.clear();
  reading_ = false;
  taken_.insert(out.incarnations.begin(), out.incarnations.end());
  put_boot(txn, fresh, now);
  lived_.take_set_back(now, options_.max_skew, out);
  if (out.set_back > 0) {
    Bytes lost;
    start_value(lost);
    put_big64(lost, static_cast<std::uint64_t>(out.lost.ended));
    put_ranges(lost, out.lost.lived);
    put_sealed(txn, meta_, kLostKey, std::move(lost));
    put_lived(txn, meta_);
  }
  put_time(txn, std::max(out.time_floor, now), false);
  check(txn.commit(), fmt::format("{}: cannot record the boot", file(kData)));
  return out;
}

void Disk::read_all(Recovered& out) {
  Cells unfolded(0, hash_);
  {
    Txn txn(env_.get(), MDB_RDONLY);
    read_meta(txn, out);
    read_writers(txn, open_table(txn, "writers", 0));
    read_log(txn, unfolded);
    find_tables(txn);
  }
  // A few tables a transaction: its end closes the handles.
  std::size_t entries = 0;
  for (auto at = tables_.begin(); at != tables_.end();) {
    Txn txn(env_.get(), MDB_RDONLY);
    for (std::size_t i = 0; i < 512 && at != tables_.end(); ++i, ++at) {
      std::string name = table_name(*at);
      MDB_stat stat{};
      check(mdb_stat(txn.get(), open_table(txn, name.c_str(), 0), &stat), name);
      entries += stat.ms_entries;
      out.state.cells.reserve(entries);
      read_table(txn, *at, unfolded, out.state);
    }
  }
  out.state.cells.reserve(out.state.cells.size() + unfolded.size());
  for (auto& [id, cell] : unfolded) {
    out.state.cells.push_back(std::move(cell));
  }
  for (const crdt::Incarnation& writer : used_) {
    if (auto at = members_.find(writer); at != members_.end()) out.state.members.insert(*at);
  }
}

void Disk::find_tables(const Txn& txn) {
  Cursor names(txn, open_table(txn, nullptr, 0));
  while (names.move(MDB_NEXT)) {
    std::string_view name = text_of(names.key());
    crdt::Generation generation;
    if (name == "meta" || name == "writers" || name == "log") continue;
    if (!read_table_name(name, generation)) {
      damaged(fmt::format("it has an unknown table of {} bytes of name", name.size()));
    }
    tables_.insert(generation);
  }
}

void Disk::forget_unused_writers(Txn& txn) {
  for (auto at = by_number_.begin(); at != by_number_.end();) {
    if (used_.contains(at->second)) {
      ++at;
      continue;
    }
    key_.clear();
    put_big32(key_, at->first);
    txn.erase(writers_dbi_, key_);
    writers_.erase(at->second);
    members_.erase(at->second);
    at = by_number_.erase(at);
  }
}

void Disk::put_boot(Txn& txn, const crdt::Incarnation& fresh, Nanos now) {
  Bytes key = boot_key(boots_++);
  start_value(value_);
  put_big64(value_, fresh.hi);
  put_big64(value_, fresh.lo);
  put_varint(value_, static_cast<std::uint64_t>(now));
  seal(key, value_);
  txn.put(meta_, key, value_);
  taken_.insert(fresh);
}

bool Disk::adopt(Txn& txn, const crdt::Incarnation& fresh, Nanos now) {
  if (!fresh || taken_.contains(fresh) || writers_.contains(fresh)) return false;
  put_boot(txn, fresh, now);
  return true;
}

std::uint64_t Disk::clear_stale_readers() {
  int stale = 0;
  check(mdb_reader_check(env_.get(), &stale), file(kData));
  return static_cast<std::uint64_t>(stale);
}

std::uint64_t Disk::map_used() const {
  MDB_envinfo info{};
  MDB_stat stat{};
  if (mdb_env_info(env_.get(), &info) != 0 || mdb_env_stat(env_.get(), &stat) != 0) return 0;
  return (info.me_last_pgno + 1) * stat.ms_psize;
}

std::uint64_t Disk::map_free() const {
  constexpr MDB_dbi kFreePages = 0;
  MDB_stat stat{};
  if (mdb_env_stat(env_.get(), &stat) != 0) return 0;
  Txn txn(env_.get(), MDB_RDONLY);
  Cursor cursor(txn, kFreePages);
  std::uint64_t pages = 0;
  while (cursor.move(MDB_NEXT)) {
    // A list of pages, its length first.
    std::size_t length = 0;
    if (cursor.value().size() < sizeof length) continue;
    std::memcpy(&length, cursor.value().data(), sizeof length);
    pages += length;
  }
  return pages * stat.ms_psize;
}

std::uint64_t Disk::append(Txn& txn, const crdt::Delta& delta) {
  key_.clear();
  put_big64(key_, log_.last + 1);
  start_value(value_);
  crdt::encode(delta, value_);
  if (value_.size() - kSealBytes > crdt::kMaxEncodedDelta) {
    throw StoreError(fmt::format("a cell of {} bytes is too large to be stored", value_.size()));
  }
  seal(key_, value_);
  txn.put(log_dbi_, key_, value_, MDB_APPEND);
  ++log_.last;
  log_.bytes += value_.size();
  return value_.size();
}

void Disk::put_time(Txn& txn, Nanos floor, bool clean) {
  MDB_dbi meta = open_table(txn, "meta", 0);
  Bytes value;
  start_value(value);
  put_varint(value, static_cast<std::uint64_t>(floor));
  put_u8(value, clean ? 1 : 0);
  put_sealed(txn, meta, kTimeKey, std::move(value));
  if (lived_.reached(floor)) put_lived(txn, meta);
}

void Disk::put_lived(Txn& txn, MDB_dbi meta) {
  Bytes lived;
  start_value(lived);
  put_ranges(lived, lived_.ranges());
  put_sealed(txn, meta, kLivedKey, std::move(lived));
}

MDB_dbi Disk::table(const Txn& txn, const crdt::Generation& generation, bool create) {
  if (auto at = handles_.find(generation); at != handles_.end()) return at->second;
  MDB_dbi dbi = open_table(txn, table_name(generation).c_str(), create ? MDB_CREATE : 0);
  tables_.insert(generation);
  handles_.emplace(generation, dbi);
  return dbi;
}

void Disk::put_writer(Txn& txn, const crdt::Incarnation& writer, Writer& entry) {
  auto member = members_.find(writer);
  entry.named = member != members_.end();
  Bytes key;
  put_big32(key, entry.number);
  Bytes value;
  start_value(value);
  put_big64(value, writer.hi);
  put_big64(value, writer.lo);
  put_u8(value, entry.named ? 1 : 0);
  if (entry.named) {
    put_text(value, member->second.region);
    put_text(value, member->second.node);
  }
  seal(key, value);
  txn.put(writers_dbi_, key, value);
}

std::uint32_t Disk::number_of(Txn& txn, const crdt::Incarnation& writer) {
  auto [at, added] = writers_.try_emplace(writer);
  if (added) {
    if (next_writer_ == std::numeric_limits<std::uint32_t>::max()) {
      throw StoreError("no number is left for a writer");
    }
    at->second.number = next_writer_++;
    by_number_.emplace(at->second.number, writer);
    put_writer(txn, writer, at->second);
  }
  return at->second.number;
}

void Disk::pack(Txn& txn, const crdt::Cell& cell, Bytes& value) {
  bool bucket = cell.id.is_bucket();
  start_value(value);
  if (bucket) {
    const crdt::BucketState& state = cell.bucket;
    first_expiry_ = std::min(first_expiry_, state.expiry);
    expiry_written_ = std::min(expiry_written_, state.expiry);
    put_varint(value, static_cast<std::uint64_t>(state.expiry));
    put_varint(value, static_cast<std::uint64_t>(state.touched));
    put_varint(value, state.checkpoint.counted);
    put_varint(value, static_cast<std::uint64_t>(state.checkpoint.at));
    put_varint(value, static_cast<std::uint64_t>(state.checkpoint.debt >> 64));
    put_varint(value, static_cast<std::uint64_t>(state.checkpoint.debt));
  }
  bool births = bucket || std::any_of(cell.slots.begin(), cell.slots.end(),
                                      [](const crdt::Slot& slot) { return slot.id.birth != 0; });
  if (births && !bucket) put_varint(value, 0);
  put_varint(value, cell.slots.size());
  for (const crdt::Slot& slot : cell.slots) {
    put_varint(value, number_of(txn, slot.id.writer));
    if (births) put_varint(value, slot.id.birth);
    put_varint(value, slot.value);
  }
}

crdt::Cell Disk::unpack(View key, View value, const crdt::Generation& generation) {
  bool bucket = generation.is_bucket();
  crdt::Cell cell;
  View content;
  if (!read_cell_key(key, bucket, cell.id) || crdt::generation_of(cell.id.epoch) != generation ||
      !unseal(key, value, content)) {
    damaged(fmt::format("table {} has a broken cell", table_name(generation)));
  }
  RecordReader reader(content);
  if (bucket) {
    crdt::BucketState& state = cell.bucket;
    state.expiry = static_cast<Nanos>(reader.varint());
    state.touched = static_cast<Nanos>(reader.varint());
    state.checkpoint.counted = reader.varint();
    state.checkpoint.at = static_cast<Nanos>(reader.varint());
    state.checkpoint.debt = static_cast<crdt::DebtTicks>(reader.varint()) << 64;
    state.checkpoint.debt |= reader.varint();
  }
  std::uint64_t count = reader.varint();
  bool births = bucket || (count == 0 && reader.left() > 0);
  if (births && !bucket) count = reader.varint();
  if (count > reader.left()) reader.fail();
  if (reader.ok()) cell.slots.reserve(static_cast<std::size_t>(count));
  for (std::uint64_t i = 0; i < count && reader.ok(); ++i) {
    crdt::Slot slot;
    std::uint64_t number = reader.varint();
    auto writer = by_number_.find(static_cast<std::uint32_t>(number));
    if (number > std::numeric_limits<std::uint32_t>::max() || writer == by_number_.end()) {
      damaged(fmt::format("table {} names an unknown writer", table_name(generation)));
    }
    slot.id.writer = writer->second;
    if (reading_) used_.insert(slot.id.writer);
    if (births) slot.id.birth = reader.varint();
    slot.value = reader.varint();
    cell.slots.push_back(slot);
  }
  if (!reader.done() || !crdt::valid(cell)) {
    damaged(fmt::format("table {} has a broken cell", table_name(generation)));
  }
  return cell;
}

bool Disk::gather(std::uint64_t upto, std::size_t cells, std::size_t bytes, std::size_t most) {
  Txn txn(env_.get(), MDB_RDONLY);
  Cursor cursor(txn, log_dbi_);
  std::uint64_t next = std::max(log_.first, gathered_upto_ + 1);
  std::size_t cells_read = 0;
  std::size_t bytes_read = 0;
  upto = std::min(upto, log_.last);
  key_.clear();
  put_big64(key_, next);
  bool more = next <= upto && cursor.seek(key_);
  for (; next <= upto && cells_read < cells && bytes_read < bytes && gathered_.size() < most;
       ++next) {
    View content;
    if (!more || RecordReader(cursor.key()).big64() != next ||
        !unseal(cursor.key(), cursor.value(), content)) {
      damaged(fmt::format("log record {} is gone or broken", next));
    }
    crdt::Delta delta;
    std::string error;
    if (!crdt::decode(content, delta, error)) {
      damaged(fmt::format("log record {}: {}", next, error));
    }
    for (auto& [incarnation, member] : delta.members) {
      if (members_.emplace(incarnation, std::move(member)).second &&
          writers_.contains(incarnation)) {
        named_late_.push_back(incarnation);
      }
    }
    cells_read += delta.cells.size();
    bytes_read += cursor.value().size();
    gathered_bytes_ += cursor.value().size();
    gathered_upto_ = next;
    for (crdt::Cell& cell : delta.cells) gathered_.add(std::move(cell));
    more = cursor.move(MDB_NEXT);
  }
  return next > upto || gathered_.size() >= most;
}

bool Disk::put_gathered(Txn& txn, std::size_t cells, Nanos floor, Nanos settled) {
  for (const crdt::Incarnation& writer : named_late_) put_writer(txn, writer, writers_.at(writer));
  named_late_.clear();
  // Bounded in tables as well: each needs a handle.
  const std::size_t most_handles = max_handles_ + kStepTables;
  crdt::Generation at;
  std::optional<Cursor> cursor;  // finds the next key mostly on the page where it is
  for (; cells > 0 && !gathered_.empty() && handles_.size() < most_handles; --cells) {
    auto [generation, cell] = gathered_.take();
    if (!generation.is_bucket() && generation.end() <= floor) continue;
    if (!cursor || at != generation) cursor.emplace(txn, table(txn, generation, true));
    at = generation;
    key_.clear();
    put_cell_key(cell.id, key_);
    if (cursor->find(key_)) {
      crdt::Cell stored = unpack(key_, cursor->value(), generation);
      if (!generation.is_bucket() || stored.expiry() > settled) {
        if (!crdt::join(stored, cell)) continue;
        cell = std::move(stored);
      }
    }
    pack(txn, cell, value_);
    seal(key_, value_);
    cursor->put(key_, value_);
  }
  if (!gathered_.empty()) return false;
  // The last cells and the records that all of them came from go in one transaction.
  Cursor records(txn, log_dbi_);
  while (log_.first <= gathered_upto_) {
    if (!records.move(MDB_FIRST) || RecordReader(records.key()).big64() != log_.first) {
      damaged(fmt::format("log record {} is gone", log_.first));
    }
    records.erase();
    ++log_.first;
  }
  log_.bytes -= gathered_bytes_;
  gathered_bytes_ = 0;
  return true;
}

bool Disk::any_ended(Nanos floor) const {
  return std::any_of(tables_.begin(), tables_.end(), [floor](const crdt::Generation& generation) {
    return generation.end() <= floor;
  });
}

void Disk::check_in_place() const {
  mdb_filehandle_t data = -1;
  check(mdb_env_get_fd(env_.get(), &data), file(kData));
  const std::pair<const char*, int> files[] = {{kData, data}, {kMarker, marker_.get()}};
  for (const auto& [name, handle] : files) {
    struct stat held {};
    struct stat there {};
    const bool same = ::fstat(handle, &held) == 0 && ::stat(file(name).c_str(), &there) == 0 &&
                      held.st_dev == there.st_dev && held.st_ino == there.st_ino;
    if (!same) throw StoreError(file(name) + " was deleted or replaced while it was in use");
  }
}

std::size_t Disk::drop_ended(Txn& txn, Nanos floor, std::size_t limit) {
  std::vector<crdt::Generation> ended;
  for (const crdt::Generation& generation : tables_) {
    if (ended.size() < limit && generation.end() <= floor) ended.push_back(generation);
  }
  // All handles first: a dropped one's number is given out again.
  for (const crdt::Generation& generation : ended) table(txn, generation, false);
  for (const crdt::Generation& generation : ended) {
    check(mdb_drop(txn.get(), handles_.at(generation), 1), table_name(generation));
    handles_.erase(generation);
    tables_.erase(generation);
  }
  return ended.size();
}

std::vector<Bytes> Disk::expired_buckets(Bytes& from, Nanos floor, std::size_t count) {
  std::vector<Bytes> keys;
  Bytes next;
  if (from.empty()) expiry_written_ = expiry_kept_ = kNever;
  if (tables_.contains(crdt::kBucketGeneration)) {
    Txn txn(env_.get(), MDB_RDONLY);
    auto handle = handles_.find(crdt::kBucketGeneration);
    MDB_dbi dbi = handle != handles_.end() ? handle->second : open_table(txn, "buckets", 0);
    Cursor cursor(txn, dbi);
    bool more = from.empty() ? cursor.move(MDB_FIRST) : cursor.seek(from);
    for (; more; more = cursor.move(MDB_NEXT)) {
      if (count-- == 0) {
        next.assign(cursor.key().begin(), cursor.key().end());
        break;
      }
      View content;
      if (!unseal(cursor.key(), cursor.value(), content)) damaged("a bucket is broken");
      const auto expiry = static_cast<Nanos>(RecordReader(content).varint());
      if (expiry > floor) {
        expiry_kept_ = std::min(expiry_kept_, expiry);
      } else {
        keys.emplace_back(cursor.key().begin(), cursor.key().end());
      }
    }
  }
  from = std::move(next);
  if (from.empty()) first_expiry_ = std::min(expiry_written_, expiry_kept_);
  return keys;
}

void Disk::erase_buckets(Txn& txn, const std::vector<Bytes>& keys) {
  MDB_dbi dbi = table(txn, crdt::kBucketGeneration, false);
  for (const Bytes& key : keys) txn.erase(dbi, key);
}

void Disk::trim_handles() {
  if (handles_.size() <= max_handles_) return;
  for (const auto& [generation, dbi] : handles_) mdb_dbi_close(env_.get(), dbi);
  handles_.clear();
}

}  // namespace weir::storage
