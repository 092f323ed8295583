#include <weir/limits/yaml/read_file.h>

#include <sys/stat.h>

#include <cerrno>
#include <cstdio>
#include <memory>
#include <vector>

namespace weir::internal {

int read_file(const std::string& path, std::size_t max, std::string& out) {
  const auto close = [](std::FILE* file) { std::fclose(file); };
  errno = 0;
  const std::unique_ptr<std::FILE, decltype(close)> file(std::fopen(path.c_str(), "rbe"), close);
  if (!file) return errno != 0 ? errno : EIO;
  std::vector<char> block(64u << 10);
  out.clear();
  while (out.size() <= max) {
    errno = 0;
    const std::size_t got = std::fread(block.data(), 1, block.size(), file.get());
    out.append(block.data(), got);
    if (got == block.size()) continue;
    if (std::ferror(file.get())) return errno != 0 ? errno : EIO;
    if (out.size() <= max) return 0;
  }
  return EFBIG;
}

FileLook look_at_file(const std::string& path) {
  struct stat file {};
  if (path.empty() || ::stat(path.c_str(), &file) != 0) return {};
  return {static_cast<std::int64_t>(file.st_dev),
          static_cast<std::int64_t>(file.st_ino),
          static_cast<std::int64_t>(file.st_size),
          static_cast<std::int64_t>(file.st_mtim.tv_sec),
          static_cast<std::int64_t>(file.st_mtim.tv_nsec),
          static_cast<std::int64_t>(file.st_ctim.tv_nsec)};
}

}  // namespace weir::internal
