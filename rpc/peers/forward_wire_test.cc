#include <weir/rpc/peers/forward_wire.h>

#include <gtest/gtest.h>

#include <limits>
#include <random>
#include <string>
#include <vector>

#include <weir/rpc/framed_bytes.h>
#include <weir/rpc/wire.h>

namespace weir::rpc {
namespace {

using test::framed;
using test::with_framed;

using Forwarded = schema::ForwardedCheck;
using Reserved = schema::Link::ReserveResults;

using Texts = std::vector<std::pair<std::string, std::string>>;

/// Random well-formed requests and answers.
class Random {
 public:
  explicit Random(std::uint64_t seed) : random_(seed) {}
  std::uint64_t below(std::uint64_t n) { return random_() % n; }
  std::uint64_t word() { return below(4) == 0 ? below(3) : random_(); }
  bool coin() { return below(2) == 0; }
  std::string text(std::size_t most) {
    std::string out(below(4) == 0 ? below(most + 1) : below(20), '\0');
    for (char& c : out) c = static_cast<char>(below(256));
    return out;
  }
  CheckItem item() {
    CheckItem out;
    out.domain = text(kMaxText);
    out.entries = entries();
    for (auto n = below(below(10) == 0 ? kMaxDescriptors : 2); n > 0; --n) {
      out.more.push_back({entries(), word()});
    }
    out.hits = word();
    out.id = text(kMaxRequestId);
    for (auto n = 1 + below(below(10) == 0 ? kMaxRuleFilter : 3); n > 0; --n) {
      out.rule_filter.push_back(text(kMaxText));
    }
    out.wants_bound = coin();
    out.kind = static_cast<RequestKind>(below(3));
    if (coin()) out.limit = {word(), nanos(), word()};
    return out;
  }
  /// At most `rules` statuses.
  Reply reply(std::size_t rules) {
    Reply out;
    if (below(5) == 0) {
      out.error = error();
      return out;
    }
    out.allowed = coin();
    out.repeated = coin();
    out.given_back = coin() ? word() : 0;
    for (auto n = below(rules + 1); n > 0; --n) {
      Status status;
      status.rule = text(kMaxText);
      status.limit = word();
      status.remaining = word();
      status.reset = nanos();
      status.retry_after = coin() ? kNever : nanos();
      status.delay = nanos();
      status.allowed = coin();
      status.shadow = coin();
      status.degraded = coin();
      status.exhausted_locally = coin();
      status.quota = word();
      status.window = nanos();
      status.descriptor = static_cast<std::uint16_t>(word());
      status.hidden = coin();
      status.deny_status = coin() ? 503 : 429;
      if (!status.allowed) status.deny_message = text(kMaxDenyMessage);
      if (coin()) status.over_admission = word() >> 1;
      out.statuses.push_back(std::move(status));
    }
    out.deciding = static_cast<int>(below(out.statuses.size() + 1)) - 1;
    return out;
  }
  SettleReply settled() { return {coin() ? error() : Error(), coin(), word(), coin(), coin()}; }
  /// `bytes` with some of them changed, or cut short.
  std::vector<std::byte> spoilt(std::vector<std::byte> bytes) {
    for (auto n = 1 + below(4); n > 0 && !bytes.empty(); --n) {
      auto at = below(bytes.size());
      switch (below(4)) {
        case 0:
          bytes[at] ^= static_cast<std::byte>(1u << below(8));
          break;
        case 1:
          bytes[at] = static_cast<std::byte>(below(256));
          break;
        case 2:
          for (auto j = at & ~7u; j < bytes.size() && j < (at & ~7u) + 8; ++j) {
            bytes[j] = static_cast<std::byte>(0xff);
          }
          break;
        default:
          bytes.resize(at + 1);
          break;
      }
    }
    return bytes;
  }

 private:
  Texts entries() {
    Texts out;
    for (auto n = below(below(10) == 0 ? kMaxEntries + 1 : 4); n > 0; --n) {
      out.emplace_back(text(kMaxText), text(kMaxText));
    }
    return out;
  }
  Error error() { return {static_cast<ErrorKind>(1 + below(7)), text(1000)}; }
  Nanos nanos() { return static_cast<Nanos>(word() >> 2); }
  std::mt19937_64 random_;
};

std::vector<std::byte> bytes_of(const CheckItem& item) {
  return framed<Forwarded>([&](auto root) { encode(item, root); });
}

std::vector<std::byte> bytes_of(const Reply& reply) {
  return framed<schema::CheckResult>([&](auto root) { encode(reply, root); });
}

std::vector<std::byte> bytes_of(const ReserveReply& reply) {
  return framed<Reserved>([&](auto root) {
    encode(reply.decision, root.initResult());
    root.setTicket(kj::StringPtr(reply.ticket.c_str(), reply.ticket.size()));
  });
}

std::vector<std::byte> bytes_of(const SettleReply& reply) {
  return framed<schema::SettleResult>([&](auto root) { encode(reply, root); });
}

bool read(std::span<const std::byte> bytes, CheckItem& out) {
  return with_framed<Forwarded>(bytes, [&](auto root) {
    if (!problem(root).empty()) return false;
    out = decode(root);
    return true;
  });
}

/// What the root takes in a message, without the message's own frame.
template <typename Root>
std::size_t size_in(std::span<const std::byte> bytes) {
  std::size_t words = 0;
  with_framed<Root>(bytes, [&](auto root) {
    words = root.totalSize().wordCount;
    return true;
  });
  return words * sizeof(capnp::word);
}

/// The memory that a request really takes.
std::size_t memory_of(const CheckItem& item) {
  std::size_t bytes = sizeof item + item.domain.capacity() + item.id.capacity();
  auto add = [&bytes](const Texts& entries) {
    for (const auto& [key, value] : entries) {
      bytes += sizeof key + sizeof value + key.capacity() + value.capacity();
    }
  };
  add(item.entries);
  for (const CheckDescriptor& each : item.more) {
    bytes += sizeof each;
    add(each.entries);
  }
  for (const std::string& rule : item.rule_filter) bytes += sizeof rule + rule.capacity();
  return bytes;
}

TEST(ForwardWire, DecodeOfEncodeIsIdentityForRandomRequests) {
  Random random(20250301);
  for (int i = 0; i < 1000; ++i) {
    const CheckItem item = random.item();
    ASSERT_EQ(problem(item), "");
    const std::vector<std::byte> bytes = bytes_of(item);
    ASSERT_LE(size_in<Forwarded>(bytes), forwarded_bytes(item)) << "the estimate falls short";
    CheckItem out;
    ASSERT_TRUE(read(bytes, out));
    ASSERT_EQ(out, item) << "request " << i;
    ASSERT_TRUE(with_framed<Forwarded>(
        bytes, [&](auto root) { return served_bytes(root) >= memory_of(out); }));
  }
}

TEST(ForwardWire, DecodeOfEncodeIsIdentityForRandomAnswers) {
  Random random(20250302);
  for (int i = 0; i < 1000; ++i) {
    const Reply reply = random.reply(5);
    Reply out;
    const std::vector<std::byte> bytes = bytes_of(reply);
    ASSERT_LE(size_in<schema::CheckResult>(bytes), answer_bytes(reply)) << "it falls short";
    ASSERT_TRUE(with_framed<schema::CheckResult>(
        bytes, [&](auto root) { return decode_answer(root, 5, out); }));
    ASSERT_EQ(out, reply) << "answer " << i;

    const ReserveReply reserved{reply, random.text(kMaxTicket)};
    ReserveReply reserved_out;
    ASSERT_TRUE(with_framed<Reserved>(
        bytes_of(reserved), [&](auto root) { return decode_answer(root, 5, reserved_out); }));
    ASSERT_EQ(reserved_out, reserved);

    const SettleReply settled = random.settled();
    SettleReply settled_out;
    ASSERT_TRUE(with_framed<schema::SettleResult>(
        bytes_of(settled), [&](auto root) { return decode_answer(root, settled_out); }));
    ASSERT_EQ(settled_out, settled);
  }
}

/// Both sides keep the same bounds, and say the same of what breaks them.
TEST(ForwardWire, BothSidesKeepTheBounds) {
  const std::string long_text(kMaxText + 1, 'x');
  std::vector<CheckItem> odd(10);
  for (CheckItem& item : odd) item.rule_filter = {"rule"};
  odd[0].domain = long_text;
  odd[1].id.assign(kMaxRequestId + 1, 'x');
  odd[2].entries.resize(kMaxEntries + 1);
  odd[3].entries = {{long_text, ""}};
  odd[4].entries = {{"", long_text}};
  odd[5].rule_filter.assign(kMaxRuleFilter + 1, "rule");
  odd[6].rule_filter = {long_text};
  odd[7].rule_filter = {};
  odd[8].more.resize(kMaxDescriptors);
  odd[9].more = {{{}, 1}, {{{long_text, ""}}, 1}};
  for (const CheckItem& item : odd) {
    const std::string why = problem(item);
    EXPECT_NE(why, "");
    with_framed<Forwarded>(bytes_of(item), [&](auto root) {
      EXPECT_EQ(problem(root), why);
      return true;
    });
  }
  CheckItem largest;
  largest.domain.assign(kMaxText, 'd');
  largest.id.assign(kMaxRequestId, 'i');
  largest.entries.assign(kMaxEntries, {std::string(kMaxText, 'k'), std::string(kMaxText, 'v')});
  largest.rule_filter.assign(kMaxRuleFilter, std::string(kMaxText, 'r'));
  EXPECT_EQ(problem(largest), "");
  CheckItem out;
  EXPECT_TRUE(read(bytes_of(largest), out));
  EXPECT_EQ(out, largest);
}

TEST(ForwardWire, AnAnswerHasAStatusForEachRuleAndDescriptorAtMost) {
  CheckItem item;
  item.rule_filter = {"a", "b", "c"};
  EXPECT_EQ(most_statuses(item), 3u);
  item.more.resize(2);
  EXPECT_EQ(most_statuses(item), 9u);
}

TEST(ForwardWire, AnswersThatAreTooLargeAreRefused) {
  Reply reply;
  reply.statuses.resize(3);
  auto refused = [](const Reply& given, std::size_t rules) {
    Reply out;
    return !with_framed<schema::CheckResult>(
        bytes_of(given), [&](auto root) { return decode_answer(root, rules, out); });
  };
  EXPECT_FALSE(refused(reply, 3));
  EXPECT_TRUE(refused(reply, 2)) << "so many rules were not named";
  reply.statuses[1].rule.assign(kMaxText + 1, 'r');
  EXPECT_TRUE(refused(reply, 3));
  Reply failed;
  failed.error.kind = ErrorKind::unknown;
  failed.error.detail.assign(5000, 'e');
  EXPECT_TRUE(refused(failed, 3));
  SettleReply settled;
  settled.error.kind = ErrorKind::unknown;
  settled.error.detail.assign(5000, 'e');
  EXPECT_FALSE(with_framed<schema::SettleResult>(
      bytes_of(settled), [&](auto root) { return decode_answer(root, settled); }));
  ReserveReply reserved;
  reserved.ticket.assign(kMaxTicket + 1, 't');
  EXPECT_FALSE(with_framed<Reserved>(bytes_of(reserved),
                                     [&](auto root) { return decode_answer(root, 3, reserved); }));
}

/// What a fuzzer would do, in every build.
TEST(ForwardWire, MutatedBytesNeverCrash) {
  Random random(11);
  int accepted = 0;
  int refused = 0;
  for (int i = 0; i < 3000; ++i) {
    CheckItem item;
    if (read(random.spoilt(bytes_of(random.item())), item)) {
      ++accepted;
      CheckItem again;
      ASSERT_EQ(problem(item), "");
      ASSERT_TRUE(read(bytes_of(item), again));
      ASSERT_EQ(again, item);
    } else {
      ++refused;
    }
    ReserveReply reserved{random.reply(3), random.text(kMaxTicket)};
    ReserveReply out;
    if (with_framed<Reserved>(random.spoilt(bytes_of(reserved)),
                              [&](auto root) { return decode_answer(root, 3, out); })) {
      ++accepted;
      ASSERT_LE(out.decision.statuses.size(), 3u);
      ASSERT_LE(out.ticket.size(), kMaxTicket);
    } else {
      ++refused;
    }
    SettleReply settled;
    with_framed<schema::SettleResult>(random.spoilt(bytes_of(random.settled())),
                                      [&](auto root) { return decode_answer(root, settled); });
  }
  EXPECT_GT(accepted, 100);
  EXPECT_GT(refused, 100);
}

}  // namespace
}  // namespace weir::rpc
