#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

#include <weir/rpc/net/output.h>

namespace weir::node {

// What a server says in RESP, appended to `out`. `resp3` where the two versions differ.

/// `text` has no CR or LF.
void append_resp_simple(rpc::Output& out, std::string_view text);
/// An error; control bytes of `text` become spaces, and it is cut after 512 bytes. It begins with
/// its kind: "ERR …".
void append_resp_error(rpc::Output& out, std::string_view text);
/// `value` as RESP's signed integer: at most 2^63 - 1.
void append_resp_integer(rpc::Output& out, std::uint64_t value);
void append_resp_minus_one(rpc::Output& out);
void append_resp_bulk(rpc::Output& out, std::string_view bytes);
void append_resp_nil(rpc::Output& out, bool resp3);
/// `count` values follow.
void append_resp_array(rpc::Output& out, std::size_t count);
/// `count` keys with their values follow.
void append_resp_map(rpc::Output& out, std::size_t count, bool resp3);

}  // namespace weir::node
