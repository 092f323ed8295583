#pragma once

#include <cstddef>
#include <cstdint>
#include <set>
#include <vector>

namespace weir::crdt {

/// Names a record of a CellArena; 0 names none.
using RecordRef = std::uint32_t;

/// Memory for many small records without a heap block each: pages of 64 KiB, each for records of
/// one size class (Bonwick's slabs, 1994). A reference is 4 bytes: the page, and where in it in
/// units of 8 bytes. So all records together take 32 GiB at most. A record larger than 4 KiB has a
/// page of its own size. A page that holds no record any more is another's, or goes back to the
/// heap: the first pages one by one, later ones by 2 MiB. These are not asked for as huge pages:
/// to find one the system may work for 50 ms, in the turn that needs it.
///
/// Records stay where they are until they are freed. Every call takes constant time, and touches
/// no record but the one it is about. Not thread-safe.
class CellArena {
 public:
  static constexpr std::size_t kUnit = 8;
  static constexpr std::size_t kPageBytes = 64 << 10;

  CellArena();
  ~CellArena();
  CellArena(const CellArena&) = delete;
  CellArena& operator=(const CellArena&) = delete;

  /// A record of at least `size` bytes, aligned to 8, with anything in it.
  /// @throws std::bad_alloc  no memory, or 32 GiB are in use
  RecordRef allocate(std::size_t size);
  void free(RecordRef ref);

  std::byte* at(RecordRef ref) const {
    return bases_[ref >> kUnitBits] + (ref & (kUnits - 1)) * kUnit;
  }
  /// The bytes that it has room for: as much as any record of `size` bytes for
  /// which room_for(size) is the same.
  std::size_t room(RecordRef ref) const;
  static std::size_t room_for(std::size_t size);

  /// Taken from the heap for records.
  std::size_t bytes() const { return bytes_; }

 private:
  static constexpr unsigned kUnitBits = 13;
  static constexpr std::uint32_t kUnits = 1u << kUnitBits;
  static constexpr std::size_t kLargest = 4096;  // that shares a page
  static constexpr std::uint16_t kNone = 0xFFFF;
  static constexpr std::size_t kClasses = 32 + 12 + 6 + 1;

  struct Page {
    std::uint32_t size = 0;  // of a record; 0: no page has this number
    std::uint32_t chunk = kNoChunk;
    std::uint32_t before = 0, behind = 0;  // among the pages of its class that have room
    std::uint16_t used = 0;
    std::uint16_t fresh = 0;      // units that were used ever
    std::uint16_t freed = kNone;  // the first freed record; each says which is next
  };

  /// Pages that were taken together.
  struct Chunk {
    std::byte* base = nullptr;  // null: no chunk has this number
    std::uint32_t unused = 0;   // a bit for each page
  };
  static constexpr std::uint32_t kNoChunk = ~std::uint32_t{0};
  static constexpr std::size_t kChunkPages = 32;
  static constexpr std::size_t kChunkBytes = kChunkPages * kPageBytes;

  static std::size_t class_of(std::size_t size);
  std::byte* take_page(Page& page);
  void give_page(const Page& page, std::byte* base);
  std::uint32_t new_page(std::size_t bytes, std::size_t record);
  void drop_page(std::uint32_t number);
  void link(std::uint32_t number);
  void unlink(std::uint32_t number);
  static bool full(const Page& page);

  std::vector<std::byte*> bases_;      // by page
  std::vector<Page> pages_;            // by page; number 0 is no page's
  std::vector<std::uint32_t> unused_;  // numbers of pages that are gone
  std::uint32_t with_room_[kClasses] = {};
  std::vector<Chunk> chunks_;
  std::set<std::uint32_t> open_chunks_;       // that have unused pages
  std::vector<std::uint32_t> unused_chunks_;  // numbers of chunks that are gone
  std::size_t bytes_ = 0;
};

}  // namespace weir::crdt
