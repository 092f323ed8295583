#include <weir/limits/limiter/items.h>

#include <algorithm>
#include <numeric>
#include <utility>

namespace weir {

void Items::join_series() {
  order_.resize(size_);
  std::iota(order_.begin(), order_.end(), 0u);
  std::sort(order_.begin(), order_.end(), [&](std::uint32_t a, std::uint32_t b) {
    return std::pair(items_[a].id, a) < std::pair(items_[b].id, b);
  });
  auto same = [&](std::size_t i) { return items_[order_[i - 1]].id == items_[order_[i]].id; };
  std::size_t i = 1;
  while (i < size_ && !same(i)) ++i;
  if (i >= size_) return;
  for (std::uint32_t each = 0; each < size_; ++each) {
    sources_.push_back({each, items_[each].descriptor, false});
  }
  for (; i < size_; ++i) {
    if (!same(i)) continue;
    std::uint32_t first = sources_[order_[i - 1]].item;
    sources_[order_[i]].item = first;
    sources_[order_[i]].again = true;
    items_[first].cost = add_saturated(items_[first].cost, items_[order_[i]].cost);
  }
  std::uint32_t kept = 0;
  for (std::uint32_t each = 0; each < size_; ++each) {
    Source& source = sources_[each];
    if (source.again) {
      source.item = sources_[source.item].item;
      continue;
    }
    if (kept != each) items_[kept] = items_[each];
    source.item = kept++;
  }
  size_ = kept;
}

void Items::split_joined(Decision& out) const {
  out.statuses.resize(sources_.size());
  // From the end on: an item stands nowhere behind its first status.
  for (std::size_t i = sources_.size(); i-- > 0;) {
    out.statuses[i] = out.statuses[sources_[i].item];
    out.statuses[i].descriptor = sources_[i].descriptor;
  }
  for (std::size_t i = 0; out.deciding >= 0 && i < sources_.size(); ++i) {
    if (sources_[i].item != static_cast<std::uint32_t>(out.deciding)) continue;
    out.deciding = static_cast<int>(i);
    break;
  }
}

}  // namespace weir
