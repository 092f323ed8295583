#include <weir/bench/spread.h>

#include <algorithm>
#include <cmath>

namespace weir::bench {

double median_of(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values.empty() ? 0 : values[values.size() / 2];
}

double round_to(double value, int digits) {
  double scale = std::pow(10, digits);
  return std::round(value * scale) / scale;
}

Json spread_of(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  Json out;
  out["median"] = round_to(median_of(values), 3);
  out["low"] = round_to(values.front(), 3);
  out["high"] = round_to(values.back(), 3);
  return out;
}

}  // namespace weir::bench
