#include <weir/proptests/sim/trace.h>

#include <fmt/format.h>

namespace weir::sim {

void Trace::line(Nanos at, int node, std::string_view what, const std::string& text) {
  std::string made =
      fmt::format("{:12.6f}  {:<5}  {:<10} {}", static_cast<double>(at) / 1e9,
                  node == kWorld ? std::string("*") : fmt::format("n{}", node), what, text);
  if (out_ != nullptr) fmt::print(out_, "{}\n", made);
  if (tail_ == 0) return;
  lines_.push_back(std::move(made));
  if (lines_.size() > tail_) lines_.pop_front();
}

}  // namespace weir::sim
