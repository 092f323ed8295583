// Fuzz target (scripts/fuzz): a store of which some bytes are others. The first says how many;
// three for the place of each, and one for what stands there. What check_lmdb_file() takes for
// sound must not kill a store that opens it, whatever it makes of its contents.
#include <unistd.h>

#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <span>
#include <string>

#include <weir/storage/lmdb_check.h>
#include <weir/storage/lmdb_store.h>

namespace {

using namespace weir;
namespace fs = std::filesystem;

constexpr Nanos kNow = 1'700'000'000 * kSecond;

storage::LmdbOptions options(const std::string& folder) {
  storage::LmdbOptions out;
  out.path = folder;
  out.map_bytes = 8u << 20;
  return out;
}

/// A folder in memory, with a store that holds windows and buckets of three writers.
class Sound {
 public:
  Sound() : folder_("/dev/shm/weir-fuzz-" + std::to_string(::getpid())) {
    fs::remove_all(folder_);
    for (std::uint64_t boot = 1; boot <= 3; ++boot) fill(boot);
    std::ifstream in(folder_ + "/data.mdb", std::ios::binary);
    bytes_.assign(std::istreambuf_iterator<char>(in), {});
    if (bytes_.empty()) std::abort();
    std::atexit([] { fs::remove_all("/dev/shm/weir-fuzz-" + std::to_string(::getpid())); });
  }
  const std::string& folder() const { return folder_; }
  const std::string& bytes() const { return bytes_; }

 private:
  void fill(std::uint64_t boot) {
    const crdt::Incarnation fresh{boot, boot};
    auto store = storage::make_lmdb_store(options(folder_));
    storage::Recovered out;
    std::string error;
    if (!store->open(fresh, kNow, {}, out, error)) std::abort();
    crdt::Delta delta;
    for (std::uint64_t i = 1; i < 40; ++i) {
      crdt::Cell cell;
      cell.id = {{i, boot}, {kNow, kNow + static_cast<Nanos>(i % 5 + 1) * kMinute}};
      cell.slots.push_back({{fresh, 0}, i});
      delta.cells.push_back(cell);
    }
    store->append({1, std::move(delta)});
    store->close(kNow);
  }

  std::string folder_;
  std::string bytes_;
};

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  static const Sound sound;
  const std::string file = sound.folder() + "/data.mdb";
  std::string bytes = sound.bytes();
  std::span input(data, size);
  if (!input.empty() && input[0] % 8 == 7) bytes.resize(bytes.size() * input[0] / 256);
  for (input = input.subspan(input.empty() ? 0 : 1); input.size() >= 4; input = input.subspan(4)) {
    const std::size_t at = (input[0] << 16 | input[1] << 8 | input[2]) % (bytes.size() + 1);
    if (at < bytes.size()) bytes[at] = static_cast<char>(input[3]);
  }
  std::ofstream(file, std::ios::binary | std::ios::trunc) << bytes;
  std::string error;
  if (!storage::check_lmdb_file(file, error)) {
    if (error.find(file) == error.npos) std::abort();
    return 0;
  }
  auto store = storage::make_lmdb_store(options(sound.folder()));
  storage::Recovered out;
  if (!store->open({99, 99}, kNow, {}, out, error)) {
    if (error.find(sound.folder()) == error.npos) std::abort();
    return 0;
  }
  store->close(kNow);
  return 0;
}
