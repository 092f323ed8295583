// Fuzz target (scripts/fuzz): arbitrary bytes as a request's body.
#include <cstdint>
#include <cstdlib>
#include <string_view>

#include <nlohmann/json.hpp>

#include <weir/node/fronts/http/http_headers.h>
#include <weir/node/fronts/http/http_json.h>

namespace {

void require(bool holds) {
  if (!holds) std::abort();
}

void within_bounds(const weir::Request& request) {
  using namespace weir;
  require(!request.domain.empty() && request.domain.size() <= rpc::kMaxText);
  require(request.id.size() <= rpc::kMaxRequestId);
  require(request.descriptors() <= kMaxDescriptors);
  for (std::size_t i = 0; i < request.descriptors(); ++i) {
    const Request one = request.part(i);
    require(one.hits <= node::kMaxHits);
    require(one.descriptor.size() <= rpc::kMaxEntries);
    for (const Entry& entry : one.descriptor) {
      require(!entry.key.empty() && entry.key.size() <= rpc::kMaxText);
      require(entry.value.size() <= rpc::kMaxText);
    }
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace weir;
  using nlohmann::json;
  const std::string_view body(reinterpret_cast<const char*>(data), size);
  // One reader for all, as in a worker: nothing may be left of what came before.
  static node::BodyReader reader;
  reader.clear();
  node::SettleBody settled;
  const bool check = reader.check(body);
  const bool checks = reader.checks(body);
  const bool reserve = reader.reserve(body);
  const bool settle = reader.settle(body, settled);
  require(reader.requests().size() == reader.size());
  for (const Request& request : reader.requests()) within_bounds(request);
  require(reader.size() >= std::size_t{check} + checks + reserve);
  require(!settle || (!settled.ticket.empty() && settled.ticket.size() <= rpc::kMaxTicket));

  if (check || checks || reserve || settle) {
    // Another library takes it for JSON too, up to its last byte, and reads the same in it.
    const json document = json::parse(body, nullptr, false);
    require(!document.is_discarded() && body.find('\0') == body.npos);
    if (check) require(document.at("domain") == reader.requests()[0].domain);
    if (settle) require(document.at("ticket") == settled.ticket);
  } else {
    require(!reader.error().expected.empty());
  }

  // Whatever a text holds, what is written of it is JSON.
  rpc::Output out;
  node::append_problem(out, reader.error());
  require(json::accept(out.view()));
  Reply reply;
  reply.deciding = 0;
  reply.statuses.emplace_back().rule = body;
  out.clear();
  node::append_answer(out, reply);
  require(json::accept(out.view()));
  node::wants_minimal(body);
  return 0;
}
