#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include <weir.capnp.h>

#include <weir/crdt/message.h>
#include <weir/rpc/check.h>

namespace weir::rpc {

/// Bytes of a region's or node's name, in a message and in the handshake.
inline constexpr std::size_t kMaxName = crdt::kMaxMemberName;
/// Incarnations a delta may name, and members they may belong to.
inline constexpr std::size_t kMaxDeltaWriters = 2 * crdt::kMaxDeltaSlots;
inline constexpr std::size_t kMaxDeltaMembers = 4096;

/// Writes `message`. False, with a reason, if it breaks a bound that decode() enforces.
bool encode(const crdt::Message& message, schema::Message::Builder out, std::string& error);

/// Copies a message out of a reader that is not trusted: sizes are checked against the bounds of
/// crdt/message.h before memory is taken, references against their tables, and every cell with
/// crdt::valid(). On failure returns false, says what was wrong in `error` and leaves `out`
/// unspecified. Never throws; what KJ throws over malformed pointers becomes the error.
bool decode(schema::Message::Reader in, crdt::Message& out, std::string& error);

/// About how many bytes the encoding takes, rounded up; cheap.
std::size_t encoded_size(const crdt::Message& message);

/// A message alone, in Cap'n Proto's standard framing.
bool encode_bytes(const crdt::Message& message, std::vector<std::byte>& out, std::string& error);
bool decode_bytes(std::span<const std::byte> bytes, crdt::Message& out, std::string& error);

void encode(const Reply& reply, schema::CheckResult::Builder out);
/// False if the result is not well-formed.
bool decode(schema::CheckResult::Reader in, Reply& out);
/// A text without a kind is of a node that knew none, and `unknown`; so is a kind that is new here.
Error decode_error(schema::ErrorKind kind, capnp::Text::Reader detail);
schema::ErrorKind encode_kind(ErrorKind kind);
schema::RequestKind encode_kind(RequestKind kind);
/// Nothing if it is new here.
std::optional<RequestKind> decode_kind(schema::RequestKind kind);

crdt::Incarnation read(schema::Incarnation::Reader in);
void write(const crdt::Incarnation& id, schema::Incarnation::Builder out);
/// False if a name is longer than kMaxName.
bool read(schema::Member::Reader in, crdt::Member& out);
void write(const crdt::Member& member, schema::Member::Builder out);

}  // namespace weir::rpc
