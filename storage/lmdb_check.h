#pragma once

#include <string>

namespace weir::storage {

/// Walks an LMDB 0.9 data file (64-bit, little-endian, no duplicate keys) with plain reads, before
/// LMDB maps it: LMDB trusts its pages, so a torn, truncated or overwritten one would crash the
/// process. Checks both meta pages, every page of every tree (place, kind, bounds, key order,
/// depth, number of entries), that all of it lies inside the file, and that no page is used twice
/// or both used and free. Contents of values are not read: they carry checksums of their own.
///
/// Nobody may write the file meanwhile. Returns false and a message that names `path`.
bool check_lmdb_file(const std::string& path, std::string& error);

}  // namespace weir::storage
