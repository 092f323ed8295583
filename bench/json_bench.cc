// What the text of HTTP costs beside a decision: a body read, an answer and its headers written.
#include <benchmark/benchmark.h>
#include <weir/node/fronts/http/http_headers.h>
#include <weir/node/fronts/http/http_json.h>

#include <string>
#include <string_view>

namespace {

using namespace weir;
using namespace weir::node;

constexpr std::string_view kCheck =
    R"({"domain":"api","descriptor":{"key":"k123456789012345678"}})";

Reply reply(bool allowed) {
  Reply out;
  out.allowed = allowed;
  out.deciding = 0;
  Status& status = out.statuses.emplace_back();
  status.rule = "per-key";
  status.allowed = allowed;
  status.limit = status.quota = 1000;
  status.remaining = allowed ? 41 : 0;
  status.reset = 12'500 * kMillisecond;
  status.retry_after = allowed ? 0 : 2'400 * kMillisecond;
  status.window = kMinute;
  return out;
}

void read(BodyReader& reader, benchmark::State& state) {
  reader.clear();
  if (!reader.check(kCheck)) state.SkipWithError("refused");
  benchmark::DoNotOptimize(reader.requests().data());
}

void write(rpc::Output& out, const Reply& reply) {
  append_rate_limit_headers(out, reply, ResetFormat::seconds, kHour);
  append_answer(out, reply);
}

void read_check(benchmark::State& state) {
  BodyReader reader;
  for (auto _ : state) read(reader, state);
}
BENCHMARK(read_check);

/// A body of `range(0)` checks: ns are those of the whole.
void read_checks(benchmark::State& state) {
  std::string body = R"({"checks":[)";
  for (std::int64_t i = 0; i < state.range(0); ++i) {
    if (i > 0) body += ',';
    body += kCheck;
  }
  body += "]}";
  BodyReader reader;
  for (auto _ : state) {
    reader.clear();
    if (!reader.checks(body)) state.SkipWithError("refused");
    benchmark::DoNotOptimize(reader.requests().data());
  }
  state.SetItemsProcessed(state.iterations() * state.range(0));
}
BENCHMARK(read_checks)->Arg(20);

/// Headers and body; range(0): allowed.
void write_answer(benchmark::State& state) {
  const Reply told = reply(state.range(0) != 0);
  rpc::Output out;
  for (auto _ : state) {
    out.clear();
    write(out, told);
    benchmark::DoNotOptimize(out.data());
  }
  state.counters["bytes"] = static_cast<double>(out.size());
}
BENCHMARK(write_answer)->Arg(1)->Arg(0);

void read_and_write(benchmark::State& state) {
  const Reply told = reply(true);
  BodyReader reader;
  rpc::Output out;
  for (auto _ : state) {
    read(reader, state);
    out.clear();
    write(out, told);
    benchmark::DoNotOptimize(out.data());
  }
}
BENCHMARK(read_and_write);

void read_and_write_minimal(benchmark::State& state) {
  const Reply told = reply(true);
  BodyReader reader;
  rpc::Output out;
  std::string_view prefer = "return=minimal";
  for (auto _ : state) {
    read(reader, state);
    out.clear();
    benchmark::DoNotOptimize(prefer);
    if (wants_minimal(prefer)) append_minimal_headers(out, told);
    benchmark::DoNotOptimize(out.data());
  }
  state.counters["bytes"] = static_cast<double>(out.size());
}
BENCHMARK(read_and_write_minimal);

}  // namespace
