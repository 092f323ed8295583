#pragma once

#include <cstddef>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <span>
#include <string>

namespace weir::crdt::test {

/// Where the fuzz targets (scripts/fuzz) put inputs to begin with: the folder that the environment
/// names, or nowhere.
class FuzzSeeds {
 public:
  FuzzSeeds() {
    if (const char* folder = std::getenv("WEIR_FUZZ_SEEDS")) folder_ = folder;
  }
  bool wanted() const { return !folder_.empty(); }
  void add(std::span<const std::byte> bytes) {
    if (!wanted()) return;
    std::filesystem::create_directories(folder_);
    std::ofstream out(folder_ + "/seed-" + std::to_string(++count_), std::ios::binary);
    out.write(reinterpret_cast<const char*>(bytes.data()),
              static_cast<std::streamsize>(bytes.size()));
  }

 private:
  std::string folder_;
  int count_ = 0;
};

}  // namespace weir::crdt::test
