#pragma once

#include <nlohmann/json.hpp>
#include <vector>

namespace weir::bench {

using Json = nlohmann::ordered_json;

/// The middle value, the upper of the two middle ones where their number is even; 0 of none.
double median_of(std::vector<double> values);
/// With so many decimal places.
double round_to(double value, int digits);
/// Median, lowest and highest of one value or more.
Json spread_of(std::vector<double> values);

}  // namespace weir::bench
