#include <fmt/format.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <stdexcept>

#include <weir/bench/machine.h>
#include <weir/bench/node/node_parts.h>

namespace weir::bench {

NodeBenchOptions NodeBenchOptions::quick() {
  NodeBenchOptions out;
  out.keys = 1'000'000;
  out.rounds = 3;
  out.counted_s = 10;
  out.rest_s = 5;
  out.window_s = 60;
  return out;
}

void need(std::uint64_t bytes, const std::string& what) {
  const std::uint64_t has = available_bytes();
  if (has >= bytes + (2ull << 30)) return;
  throw LeftOut(fmt::format("{} takes {:.1f} GiB and 2 GiB besides; this machine has {:.1f} left",
                            what, static_cast<double>(bytes) / (1 << 30),
                            static_cast<double>(has) / (1 << 30)));
}

Json in_child(const std::function<Json()>& body) {
  int ends[2];
  if (::pipe(ends) != 0) throw std::runtime_error("no pipe");
  const pid_t child = ::fork();
  if (child < 0) throw std::runtime_error("fork failed");
  if (child == 0) {
    ::close(ends[0]);
    std::string text;
    int code = 0;
    try {
      text = body().dump();
    } catch (const std::exception& error) {
      text = error.what();
      code = 1;
    }
    FILE* out = ::fdopen(ends[1], "w");
    std::fwrite(text.data(), 1, text.size(), out);
    std::fclose(out);
    ::_exit(code);
  }
  ::close(ends[1]);
  std::string text;
  char bytes[4096];
  for (ssize_t n = 0; (n = ::read(ends[0], bytes, sizeof bytes)) > 0;) {
    text.append(bytes, static_cast<std::size_t>(n));
  }
  ::close(ends[0]);
  int status = 0;
  ::waitpid(child, &status, 0);
  if (!WIFEXITED(status) || WEXITSTATUS(status) != 0) {
    throw std::runtime_error("a child failed: " + text);
  }
  return Json::parse(text);
}

}  // namespace weir::bench
