#include <weir/rpc/check.h>

namespace weir::rpc {

namespace {

std::vector<std::pair<std::string, std::string>> texts_of(std::span<const Entry> entries) {
  std::vector<std::pair<std::string, std::string>> texts;
  texts.reserve(entries.size());
  for (const Entry& entry : entries) {
    texts.emplace_back(std::string(entry.key), std::string(entry.value));
  }
  return texts;
}

}  // namespace

CheckItem item_of(const Request& request) {
  CheckItem item;
  item.domain = std::string(request.domain);
  item.entries = texts_of(request.descriptor);
  for (const Descriptor& each : request.more) {
    item.more.push_back({texts_of(each.entries), each.hits});
  }
  item.hits = request.hits;
  item.id = std::string(request.id);
  item.wants_bound = request.wants_bound;
  item.kind = request.kind;
  item.limit = request.limit;
  return item;
}

}  // namespace weir::rpc
