#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include <weir/limits/rules/rule.h>
#include <weir/rpc/net/address.h>

namespace weir::node {

/// An address as MatchCidr has it: one of IPv4 within ::ffff:0:0/96.
using Ip = std::array<std::uint8_t, 16>;
Ip mapped(const rpc::Address& address);

bool holds(const MatchCidr& network, const Ip& ip);
/// One of them does.
bool holds(const std::vector<MatchCidr>& networks, const Ip& ip);
/// Every address of `inner` is in `outer`.
bool within(const MatchCidr& inner, const MatchCidr& outer);

/// 127.0.0.0/8 and ::1.
const std::vector<MatchCidr>& loopback();

}  // namespace weir::node
