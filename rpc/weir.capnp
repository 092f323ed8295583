@0x9c42e111e776728b;
# What nodes say to each other and what clients say to a node. docs/protocol.md explains it.
#
# Growth: fields, union members and methods are only ever added, with the next free number; none is
# renumbered, reused or given another meaning. A change that an older node would misread takes a new
# protocol version, which the handshake negotiates.

using Cxx = import "/capnp/c++.capnp";
$Cxx.namespace("weir::rpc::schema");

# ---- Peers ----

struct Member {
  region @0 :Text;
  node @1 :Text;
}

struct Incarnation {
  hi @0 :UInt64;
  lo @1 :UInt64;
}

struct Hello {
  version @0 :UInt32;        # the newest protocol version the dialer speaks
  oldestVersion @1 :UInt32;  # and the oldest
  cluster @2 :Text;
  member @3 :Member;
  incarnation @4 :Incarnation;
  nonce @5 :Data;            # 32 random bytes
}

struct Welcome {
  version @0 :UInt32;        # the version this session speaks
  member @1 :Member;
  incarnation @2 :Incarnation;
  nonce @3 :Data;            # 32 random bytes
}

interface Gate {
  # What a stranger gets: the two steps of the handshake, each once per connection. If `refused` is
  # not empty it says why, and nothing else is set.
  hello @0 (hello :Hello) -> (refused :Text, welcome :Welcome);
  prove @1 (mac :Data) -> (refused :Text, mac :Data, link :Link);
}

interface Link {
  # Carries messages and questions from the dialer to the acceptor, never back.
  send @0 (message :Message) -> ();  # returns when the receiver is ready for more
  ping @1 () -> (atNs :Int64, namesake :Bool);
  # The acceptor's wall clock, ns since 1970; 0 of one that does not tell. `namesake`: another node
  # has proved lately that it is the dialer's member.

  # What the acceptor is to decide for the dialer: see Service for what each means. A call that
  # fails as overloaded, or as unimplemented, was not begun.
  check @2 (requests :List(ForwardedCheck)) -> (results :List(CheckResult));
  reserve @3 (request :ForwardedCheck, timeoutNs :Int64) -> (result :CheckResult, ticket :Text);
  settle @4 (ticket :Text, hits :UInt64) -> (result :SettleResult);
}

struct ForwardedCheck {
  request @0 :CheckRequest;  # without `ruleFilter`
  rules @1 :List(Text);      # these alone are to decide, there and no further; at least one
}

struct Message {
  union {
    push @0 :Push;
    ack @1 :Ack;
    digestOffer @2 :DigestOffer;
    inventory @3 :Inventory;
    repair @4 :Repair;
    rightsRequest @5 :RightsRequest;
    rejoinRequest @6 :RejoinRequest;
    rejoinConfirmation @7 :RejoinConfirmation;
  }
}

struct RightsRequest {
  # Escrow rules: transfer rights of a window to the sender's incarnation, `wanted` in all.
  ruleHi @0 :UInt64;
  ruleLo @1 :UInt64;
  seriesHi @2 :UInt64;
  seriesLo @3 :UInt64;
  epochStart @4 :Int64;
  epochExpiry @5 :Int64;
  wanted @6 :UInt64;
}

struct RejoinRequest {
  incarnation @0 :Incarnation;
  atNs @1 :Int64;
  version @2 :UInt64;
}

struct RejoinConfirmation {
  incarnation @0 :Incarnation;
  atNs @1 :Int64;
  nowNs @2 :Int64;
  rows @3 :UInt64;
}

struct Push {
  pusher @0 :Incarnation;
  after @1 :UInt64;
  upto @2 :UInt64;
  base @3 :Bool;
  delta @4 :Data;            # an encoded delta: docs/encoded-delta.md
}

struct Ack {
  pusher @0 :Incarnation;
  receiver @1 :Incarnation;
  upto @2 :UInt64;
}

struct DigestOffer {
  # Groups as columns of equal length.
  floor @0 :Int64;
  round @1 :UInt64;
  groups @2 :Groups;
  digest @3 :List(UInt64);
}

struct Groups {
  grainLog2 @0 :List(Int8);
  number @1 :List(Int64);
  shard @2 :List(UInt16);
}

struct Inventory {
  # One row of low, high and cellCount for each group; the cells of all groups follow one another.
  round @0 :UInt64;
  more @1 :Bool;
  groups @2 :Groups;
  low @3 :List(UInt64);
  high @4 :List(UInt64);
  cellCount @5 :List(UInt32);
  cellKey @6 :List(UInt64);
  cellDigest @7 :List(UInt64);
}

struct Repair {
  # Wanted keys of all groups follow one another, keyCount for each group.
  delta @0 :Data;            # as in Push
  groups @1 :Groups;
  keyCount @2 :List(UInt32);
  key @3 :List(UInt64);
}

# ---- Clients ----

interface Service {
  check @0 (requests :List(CheckRequest)) -> (results :List(CheckResult));
  status @1 () -> (json :Text, error :Text, errorKind :ErrorKind);
  reserve @2 (request :CheckRequest, timeoutNs :Int64) -> (result :CheckResult, ticket :Text);
  # `hits` of the request is the estimate. `ticket` is empty if nothing is held.
  settle @3 (ticket :Text, hits :UInt64) -> (result :SettleResult);
  lease @4 (request :CheckRequest, most :UInt64, termNs :Int64)
      -> (result :CheckResult, ticket :Text, hits :UInt64, termNs :Int64);
  # Decides the request and, if it can, holds up to `most` hits in all, which the client may spend on
  # its own within termNs from when it sent this. `ticket` is settled with what was used; it is empty
  # if there is no lease.
  rules @5 (known :Text) -> (yaml :Text, version :Text, same :Bool, error :Text,
      errorKind :ErrorKind);
  # The rules in force (docs/rules.md): what a client's failure policy goes by. Where `known` is their
  # version, `same` is told in place of the text.
  authenticate @6 (token :Text) -> (error :Text, errorKind :ErrorKind);
  # Says by a bearer token who calls, for the rest of the connection. A client waits for the answer
  # before it calls anything else.
}

struct CheckRequest {
  domain @0 :Text;
  entries @1 :List(Entry);
  hits @2 :UInt64 = 1;   # 0 peeks
  id @3 :Text;           # not empty: names the request, which then counts once
  ruleFilter @4 :List(Text);  # reserved: nodes used to ask each other as clients. See ForwardedCheck
  wantsBound @5 :Bool;   # the answer should tell overAdmission
  more @6 :List(Descriptor);  # further descriptors: all rules of all must allow, or nothing counts
  kind @7 :RequestKind;  # older nodes take every request for a check
  limit @8 :RequestLimit;     # for rules with limit: from_request
}

enum RequestKind {
  # limits/request.h says what each means.
  check @0;
  report @1;
  refund @2;
}

struct RequestLimit {
  # What is 0 is not brought: the rule's maximum stands for it.
  limit @0 :UInt64;      # units per windowNs
  windowNs @1 :Int64;
  burst @2 :UInt64;
}

struct Descriptor {
  entries @0 :List(Entry);
  hits @1 :UInt64 = 1;   # 0 peeks
}

enum ErrorKind {
  # limits/reply.h says what each means.
  none @0;
  invalid @1;
  unavailable @2;
  overloaded @3;
  deadline @4;
  unknown @5;
  closed @6;
  unsupported @7;
  unauthenticated @8;
  forbidden @9;
}

struct Entry {
  key @0 :Text;
  value @1 :Text;
}

struct CheckResult {
  error @0 :Text;              # no decision was made, and why; errorKind says of what kind
  allowed @1 :Bool;
  deciding @2 :Int32 = -1;     # index into statuses; -1: no enforcing rule matched
  statuses @3 :List(RuleStatus);
  repeated @4 :Bool;           # the id passed before: what it was told then
  errorKind @5 :ErrorKind;
  givenBack @6 :UInt64;        # of a refund: units, in the rule that gave back the most
}

struct SettleResult {
  error @0 :Text;              # nothing was settled, and why
  settled @1 :Bool;            # false: no such ticket is open, nothing has changed
  reserved @2 :UInt64;         # hits, as estimated
  lapsed @3 :Bool;             # some window was over, of a rule that drops: nothing was counted
  degraded @4 :Bool;           # counted, and not durable as a rule promises: storage has failed
  errorKind @5 :ErrorKind;
}

struct RuleStatus {
  rule @0 :Text;
  limit @1 :UInt64;
  remaining @2 :UInt64;
  resetNs @3 :Int64;
  retryAfterNs @4 :Int64;      # -1: this cost can never pass
  allowed @5 :Bool;
  shadow @6 :Bool;
  degraded @7 :Bool;
  delayNs @8 :Int64;           # allowed: after this long forward the request (leaky buckets)
  overAdmission @9 :Int64 = -1;  # if asked for: units, by which the rule may be over its limit at most
  exhaustedLocally @10 :Bool;   # denied: other members may have rights left, and are being asked
  quota @11 :UInt64;            # units per windowNs, as configured
  windowNs @12 :Int64;          # 0: of no fixed length
  descriptor @13 :UInt16;       # of the request, that it is about
  hidden @14 :Bool;             # no header for end users says anything of the rule
  denyStatus @15 :UInt16 = 429; # denied: the HTTP status, 403, 429 or 503
  denyMessage @16 :Text;        # denied: what a person is told; empty: nothing of the rule's own
}
