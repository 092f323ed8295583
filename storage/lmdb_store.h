#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>

#include <weir/storage/store.h>

namespace weir::storage {

/// On-disk format of this program. A store with a higher one is refused.
inline constexpr std::uint32_t kFormatVersion = 1;

/// Pacing of the writer thread's background work. The defaults are for nodes; tests turn them up.
struct LmdbTuning {
  /// A log this old, this big or this long is folded into the tables.
  std::chrono::milliseconds fold_age{10'000};
  std::uint64_t fold_bytes = 64u << 20;
  std::uint64_t fold_records = 1u << 14;
  /// One fold step takes about this long (it delays the commits behind it), and never more than
  /// these cells and bytes of log, plus one record. A fold holds about so many cells in memory.
  std::chrono::microseconds fold_step{20'000};
  std::size_t fold_step_cells = 20'000;
  std::size_t fold_step_bytes = 2u << 20;
  std::size_t fold_cells = 400'000;
  /// A log record is closed once it has this many cells or about this many bytes.
  std::size_t record_cells = 1024;
  std::size_t record_bytes = 48u << 10;
  /// A commit takes no more than about this many bytes.
  std::size_t commit_bytes = 16u << 20;
  /// Expired buckets: how often a scan starts, and how it is paced.
  std::chrono::milliseconds scan_interval{10'000};
  std::chrono::milliseconds scan_pace{20};
  std::size_t scan_step = 4096;
  std::chrono::milliseconds reader_check_interval{30'000};
  /// Table handles kept open between steps.
  std::size_t max_handles = 1024;
};

/// Faults to provoke: each is called on the writer thread around every commit that it makes, and
/// returns 0 or an error code to take as the commit's. All may be empty.
struct LmdbHooks {
  std::function<int()> before_commit;  ///< an error: nothing is written
  std::function<int()> after_commit;   ///< an error: written, but not known to be
};

std::unique_ptr<Store> make_lmdb_store(LmdbOptions options, LmdbTuning tuning, LmdbHooks hooks);

}  // namespace weir::storage
