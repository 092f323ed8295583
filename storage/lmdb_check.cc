#include <weir/storage/lmdb_check.h>

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string_view>
#include <vector>

#include <fmt/format.h>

namespace weir::storage {

namespace {

static_assert(std::endian::native == std::endian::little && sizeof(void*) == 8,
              "the store's files are those of 64-bit little-endian machines");

// LMDB's on-disk layout (mdb.c of 0.9): page header, node, database record, meta page.
constexpr std::uint32_t kMagic = 0xBEEFC0DE;
constexpr std::uint32_t kDataVersion = 1;
constexpr std::uint64_t kNoPage = ~std::uint64_t{0};
constexpr std::size_t kPageHeader = 16;
constexpr std::size_t kNodeHeader = 8;
constexpr std::size_t kDbBytes = 48;
constexpr unsigned kBranch = 0x01;
constexpr unsigned kLeaf = 0x02;
constexpr unsigned kOverflow = 0x04;
constexpr unsigned kMeta = 0x08;
constexpr unsigned kBigData = 0x01;
constexpr unsigned kSubData = 0x02;
constexpr std::uint16_t kIntegerKey = 0x08;
constexpr unsigned kMaxDepth = 32;
/// A transaction has at most this many dirty pages, and those it gave up again need not have been
/// written: the file may end that much before the last page number handed out.
constexpr std::uint64_t kMaxUnwritten = 131072;

struct Damage : std::runtime_error {
  using std::runtime_error::runtime_error;
};

template <typename... Args>
[[noreturn]] void damaged(fmt::format_string<Args...> format, Args&&... args) {
  throw Damage(fmt::format(format, std::forward<Args>(args)...));
}

template <typename T>
T load(const std::byte* at) {
  T value;
  std::memcpy(&value, at, sizeof value);
  return value;
}

struct Db {
  std::uint16_t flags = 0;
  std::uint16_t depth = 0;
  std::uint64_t entries = 0;
  std::uint64_t root = kNoPage;
};

Db load_db(const std::byte* at) {
  return {load<std::uint16_t>(at + 4), load<std::uint16_t>(at + 6), load<std::uint64_t>(at + 32),
          load<std::uint64_t>(at + 40)};
}

struct Meta {
  std::uint32_t page_size = 0;
  Db free;
  Db main;
  std::uint64_t last_page = 0;
  std::uint64_t txn = 0;
};

enum class Tree { free, main, named };

class Checker {
 public:
  Checker(int fd, std::uint64_t size) : fd_(fd), size_(size) {}

  void run() {
    Meta meta = newest_meta();
    page_size_ = meta.page_size;
    last_page_ = meta.last_page;
    if (last_page_ < 1 || last_page_ >= size_ / page_size_ + kMaxUnwritten) {
      damaged("its {} bytes do not hold {} pages of {}", size_, last_page_, page_size_);
    }
    taken_.assign(last_page_ + 1, false);
    taken_[0] = taken_[1] = true;
    if (meta.free.flags != kIntegerKey || meta.main.flags != 0) damaged("unknown table flags");
    walk(meta.main, Tree::main);
    walk(meta.free, Tree::free);
    for (std::uint64_t page : free_pages_) claim(page, 1);
  }

 private:
  void read(std::uint64_t offset, std::byte* out, std::size_t count) {
    if (offset > size_ || count > size_ - offset) {
      damaged("it ends at {} bytes, before data at {}", size_, offset);
    }
    while (count > 0) {
      ssize_t got = ::pread(fd_, out, count, static_cast<off_t>(offset));
      if (got < 0 && errno == EINTR) continue;
      if (got < 0) damaged("cannot read at {}: {}", offset, std::strerror(errno));
      if (got == 0) damaged("it ends at {}", offset);
      out += got;
      offset += static_cast<std::uint64_t>(got);
      count -= static_cast<std::size_t>(got);
    }
  }

  Meta read_meta(std::uint64_t offset, std::uint64_t page) {
    std::array<std::byte, kPageHeader + 136> bytes{};
    read(offset, bytes.data(), bytes.size());
    const std::byte* at = bytes.data() + kPageHeader;
    if (load<std::uint64_t>(bytes.data()) != page ||
        load<std::uint16_t>(bytes.data() + 10) != kMeta || load<std::uint32_t>(at) != kMagic) {
      damaged("no LMDB header at {}", offset);
    }
    if (std::uint32_t version = load<std::uint32_t>(at + 4); version != kDataVersion) {
      damaged("LMDB data version {}, this program reads {}", version, kDataVersion);
    }
    Meta meta;
    meta.page_size = load<std::uint32_t>(at + 24);
    meta.free = load_db(at + 24);
    meta.main = load_db(at + 24 + kDbBytes);
    meta.last_page = load<std::uint64_t>(at + 24 + 2 * kDbBytes);
    meta.txn = load<std::uint64_t>(at + 32 + 2 * kDbBytes);
    if (meta.page_size < 512 || meta.page_size > 32768 || !std::has_single_bit(meta.page_size)) {
      damaged("page size {}", meta.page_size);
    }
    return meta;
  }

  Meta newest_meta() {
    Meta first = read_meta(0, 0);
    Meta second = read_meta(first.page_size, 1);
    if (first.page_size != second.page_size) damaged("its two headers disagree");
    // Commits alternate between the two headers: their numbers are neighbours. Anything else means
    // that one was overwritten, and the older state must not be taken for the newest.
    bool fresh = first.txn == 0 && second.txn == 0;
    bool neighbours = first.txn % 2 == 0 && second.txn % 2 == 1 &&
                      (first.txn + 1 == second.txn || second.txn + 1 == first.txn);
    if (!fresh && !neighbours) {
      damaged("its headers are of commits {} and {}", first.txn, second.txn);
    }
    return first.txn > second.txn ? first : second;
  }

  void claim(std::uint64_t page, std::uint64_t count) {
    if (page > last_page_ || count > last_page_ - page + 1) {
      damaged("page {} is out of range", page);
    }
    for (std::uint64_t i = page; i < page + count; ++i) {
      if (taken_[i]) damaged("page {} is used twice", i);
      taken_[i] = true;
    }
  }

  void walk(const Db& db, Tree tree) {
    if (db.root == kNoPage) {
      if (db.depth != 0 || db.entries != 0) damaged("a table lost its root");
      return;
    }
    if (db.depth == 0 || db.depth > kMaxDepth) damaged("a table of depth {}", db.depth);
    // Trees nest only one level: named ones inside the main one.
    Walk state{tree, db.depth, 0, {}, false};
    walk_page(db.root, 1, state);
    if (state.entries != db.entries) {
      damaged("a table has {} entries instead of {}", state.entries, db.entries);
    }
  }

  struct Walk {
    Tree tree;
    unsigned depth;
    std::uint64_t entries;
    std::string last;  ///< the last key in order, a branch's or a leaf's
    bool last_is_leaf;
  };

  static int compare(Tree tree, std::string_view a, std::string_view b) {
    if (tree == Tree::free && a.size() == 8 && b.size() == 8) {
      auto x = load<std::uint64_t>(reinterpret_cast<const std::byte*>(a.data()));
      auto y = load<std::uint64_t>(reinterpret_cast<const std::byte*>(b.data()));
      return x < y ? -1 : x > y ? 1 : 0;
    }
    return a.compare(b);
  }

  /// Keys come in order; a branch's key may equal the first leaf key below it.
  static void in_order(Walk& state, std::string_view key, bool leaf) {
    int order = compare(state.tree, state.last, key);
    bool first = state.entries == 0 && state.last.empty();
    if (!first && (order > 0 || (order == 0 && leaf && state.last_is_leaf))) {
      damaged("keys out of order");
    }
    state.last.assign(key);
    state.last_is_leaf = leaf;
  }

  void walk_page(std::uint64_t number, unsigned level, Walk& state) {
    claim(number, 1);
    std::vector<std::byte> page(page_size_);
    read(number * page_size_, page.data(), page.size());
    const std::byte* base = page.data();
    unsigned flags = load<std::uint16_t>(base + 10);
    bool leaf = level == state.depth;
    std::size_t lower = load<std::uint16_t>(base + 12);
    std::size_t upper = load<std::uint16_t>(base + 14);
    if (load<std::uint64_t>(base) != number || flags != (leaf ? kLeaf : kBranch)) {
      damaged("page {} is not what it should be", number);
    }
    if (lower <= kPageHeader || lower % 2 != 0 || lower > upper || upper > page_size_) {
      damaged("page {} has impossible bounds", number);
    }
    std::size_t count = (lower - kPageHeader) / 2;
    std::size_t filled = 0;
    for (std::size_t i = 0; i < count; ++i) {
      std::size_t offset = load<std::uint16_t>(base + kPageHeader + 2 * i);
      if (offset < upper || offset + kNodeHeader > page_size_) {
        damaged("page {} has an entry outside", number);
      }
      const std::byte* node = base + offset;
      std::uint64_t low = load<std::uint16_t>(node);
      std::uint64_t high = load<std::uint16_t>(node + 2);
      unsigned node_flags = load<std::uint16_t>(node + 4);
      std::size_t key_size = load<std::uint16_t>(node + 6);
      std::size_t room = page_size_ - offset - kNodeHeader;
      if (key_size > room) damaged("page {} has an entry outside", number);
      std::string_view key(reinterpret_cast<const char*>(node + kNodeHeader), key_size);
      if (!leaf) {
        // The first key of a branch is never compared.
        if (i > 0) in_order(state, key, false);
        filled += (kNodeHeader + key_size + 1) & ~std::size_t{1};
        walk_page(low | high << 16 | std::uint64_t{node_flags} << 32, level + 1, state);
        continue;
      }
      in_order(state, key, true);
      ++state.entries;
      std::uint64_t data_size = low | high << 16;
      std::size_t stored = (node_flags & kBigData) != 0 ? 8 : static_cast<std::size_t>(data_size);
      if (stored > room - key_size) damaged("page {} has an entry outside", number);
      filled += (kNodeHeader + key_size + stored + 1) & ~std::size_t{1};
      visit(state, node_flags, node + kNodeHeader + key_size, data_size, number);
    }
    if (filled != page_size_ - upper) damaged("page {} has overlapping entries", number);
  }

  void visit(const Walk& state, unsigned flags, const std::byte* data, std::uint64_t size,
             std::uint64_t number) {
    if (flags == kSubData && state.tree == Tree::main && size == kDbBytes) {
      Db db = load_db(data);
      if (db.flags != 0) damaged("unknown table flags");
      walk(db, Tree::named);
      return;
    }
    if (state.tree == Tree::main) damaged("page {} holds a value among the tables", number);
    if (flags != 0 && flags != kBigData) damaged("page {} has unknown flags", number);
    std::uint64_t first = 0;
    if (flags == kBigData) {
      first = load<std::uint64_t>(data);
      claim_overflow(first, size);
    }
    if (state.tree != Tree::free) return;
    std::vector<std::byte> list(static_cast<std::size_t>(size));
    if (flags == kBigData) {
      read(first * page_size_ + kPageHeader, list.data(), list.size());
    } else {
      std::memcpy(list.data(), data, list.size());
    }
    std::uint64_t count = size >= 8 ? load<std::uint64_t>(list.data()) : kNoPage;
    if (count > (size - 8) / 8) damaged("page {} has a broken list of free pages", number);
    for (std::uint64_t i = 1; i <= count; ++i) {
      auto page = load<std::uint64_t>(list.data() + 8 * i);
      // LMDB keeps these lists sorted, downwards.
      if (i > 1 && page >= free_pages_.back()) {
        damaged("page {} has a broken list of free pages", number);
      }
      free_pages_.push_back(page);
    }
  }

  void claim_overflow(std::uint64_t first, std::uint64_t size) {
    claim(first, 1);
    std::array<std::byte, kPageHeader> header{};
    read(first * page_size_, header.data(), header.size());
    std::uint64_t pages = load<std::uint32_t>(header.data() + 12);
    if (load<std::uint64_t>(header.data()) != first ||
        load<std::uint16_t>(header.data() + 10) != kOverflow ||
        pages != (kPageHeader - 1 + size) / page_size_ + 1) {
      damaged("page {} is not what it should be", first);
    }
    if (pages > 1) claim(first + 1, pages - 1);
    if (first + pages > size_ / page_size_) {
      damaged("it ends at {} bytes, inside a value", size_);
    }
  }

  int fd_;
  std::uint64_t size_;
  std::uint64_t page_size_ = 0;
  std::uint64_t last_page_ = 0;
  std::vector<bool> taken_;
  std::vector<std::uint64_t> free_pages_;
};

}  // namespace

bool check_lmdb_file(const std::string& path, std::string& error) {
  int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (fd < 0) {
    error = fmt::format("{}: {}", path, std::strerror(errno));
    return false;
  }
  bool good = false;
  struct stat info {};
  if (::fstat(fd, &info) != 0) {
    error = fmt::format("{}: {}", path, std::strerror(errno));
  } else {
    try {
      Checker(fd, static_cast<std::uint64_t>(info.st_size)).run();
      good = true;
    } catch (const Damage& damage) {
      error = fmt::format("{} is damaged: {}", path, damage.what());
    } catch (const std::exception& failure) {
      error = fmt::format("{}: cannot be checked: {}", path, failure.what());
    }
  }
  ::close(fd);
  return good;
}

}  // namespace weir::storage
