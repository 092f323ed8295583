#pragma once

#include <cstddef>
#include <string>

#include <weir.capnp.h>

#include <weir/rpc/check.h>

namespace weir::rpc {

/// What one node asks another (schema::Link), to and from the schema. CheckItem::rule_filter names
/// the rules that are to decide, at least one. A schema::CheckResult is written by encode() of
/// wire.h.

/// Why `item` cannot be forwarded; empty: it can.
std::string problem(const CheckItem& item);
/// The same of what another node sent. Throws what KJ throws over malformed pointers.
std::string problem(schema::ForwardedCheck::Reader in);

/// About how many bytes the request's encoding takes, and that of its answer; rounded up; cheap.
std::size_t forwarded_bytes(const CheckItem& item);
/// The memory that the request takes once it is decoded, with its answer. Of one without a
/// problem().
std::size_t served_bytes(schema::ForwardedCheck::Reader in);

/// Writes an item without a problem().
void encode(const CheckItem& item, schema::ForwardedCheck::Builder out);
/// Copies a request without a problem().
CheckItem decode(schema::ForwardedCheck::Reader in);

/// Statuses that an answer to `item` has at most: one for each rule and descriptor.
std::size_t most_statuses(const CheckItem& item);
/// An answer with at most so many statuses. False if it is not well-formed. Never throws.
bool decode_answer(schema::CheckResult::Reader in, std::size_t statuses, Reply& out);
/// The same, of a reservation.
bool decode_answer(schema::Link::ReserveResults::Reader in, std::size_t statuses,
                   ReserveReply& out);

void encode(const SettleReply& reply, schema::SettleResult::Builder out);
/// False if it is not well-formed. Never throws.
bool decode_answer(schema::SettleResult::Reader in, SettleReply& out);

/// About how many bytes the answer's encoding takes.
std::size_t answer_bytes(const Reply& reply);

}  // namespace weir::rpc
