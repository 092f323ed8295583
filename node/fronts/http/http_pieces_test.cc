// What a client is answered does not depend on how its bytes are cut into reads: over drawn
// requests, good and bad, and over every cut of some.

#include <rapidcheck.h>

#include <cstdlib>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include <weir/node/fronts/http/http_test_util.h>

namespace weir::node::test {
namespace {

using rc::gen::element;
using rc::gen::inRange;

using Texts = std::vector<std::string>;

// Most often one of the good ones: a request that is refused ends its connection.
std::string draw(const Texts& good, const Texts& bad) {
  return *inRange(0, 40) == 0 ? *rc::gen::elementOf(bad) : *rc::gen::elementOf(good);
}

std::string draw_fields() {
  const Texts good = {"Content-Type: application/json\r\n",
                      "prefer:return=minimal\r\n",
                      "X-Request-ID: \t7 \r\n",
                      "Accept: */*\r\n",
                      "Connection: keep-alive\r\n",
                      "Empty:\r\n",
                      "Long: " + std::string(3000, 'x') + "\r\n"};
  const Texts bad = {"Connection: close\r\n",
                     "Host: b\r\n",
                     "Folded: a\r\n b\r\n",
                     "Content-Length: 1\r\n",
                     "A : b\r\n",
                     "Transfer-Encoding: chunked\r\n",
                     "Bare: lf\n",
                     "Control: \x01\r\n",
                     "Connection: ,\r\n",
                     "Expect: 100-continue\r\n"};
  std::string out;
  const int count = *inRange(0, 5);
  for (int i = 0; i < count; ++i) out += draw(good, bad);
  return out;
}

std::string draw_chunks() {
  std::string out;
  const int count = *inRange(0, 4);
  for (int i = 0; i < count; ++i) {
    const auto size = *inRange<std::size_t>(1, 40);
    out += fmt::format("{:x}", size) + draw({"", ";a=b", ";"}, {" ", ";\"\r\n\"", "x"});
    out += "\r\n" + std::string(size, 'c') + draw({"\r\n"}, {"", "\n"});
  }
  return out + draw({"0\r\n\r\n", "000;x\r\nTrailer: x\r\n\r\n"}, {"0\r\n", "\r\n"});
}

std::string draw_request() {
  std::string out = draw({"", "\r\n"}, {"\r\n\r\n", "\n"});
  out += draw({"GET ", "POST ", "HEAD "}, {"OPTIONS ", "get\t", "CONNECT "});
  out += draw({"/", "/late", "/late/x?y", "/a?b?c", "http://h/late?p", "http://h"},
              {"*", "/#", "h:80", ""});
  out += draw({" HTTP/1.1\r\n"}, {" HTTP/1.0\r\n", " HTTP/2.0\r\n", "\r\n"});
  out += draw({"Host: a.example:80\r\n"}, {"", "Host: a b\r\n"}) + draw_fields();
  const int kind = *inRange(0, 3);
  if (kind == 0) return out + "\r\n";
  if (kind == 1) return out + "Transfer-Encoding: chunked\r\n\r\n" + draw_chunks();
  const auto size = *inRange<std::size_t>(0, 2050);
  return out + fmt::format("Content-Length: {}\r\n\r\n{}", size, std::string(size, 'b'));
}

std::string draw_bytes() {
  std::string out;
  const int count = *inRange(1, 6);
  for (int i = 0; i < count; ++i) out += draw_request();
  const int changes = *element(0, 0, 0, 0, 1, 2);
  for (int i = 0; i < changes; ++i) {
    const auto at = *inRange<std::size_t>(0, out.size());
    switch (*inRange(0, 3)) {
      case 0:
        out[at] = *element('\0', '\r', '\n', ' ', ':', '0', '\x7f', '\xff');
        break;
      case 1:
        out.erase(at, *inRange<std::size_t>(1, 4));
        break;
      default:
        out.insert(at, 1, *element('\r', '\n', ' ', ',', ';', '1'));
    }
    if (out.empty()) out = " ";
  }
  return out;
}

std::vector<std::string_view> draw_cuts(std::string_view bytes) {
  std::vector<std::string_view> out;
  const auto most = *element<std::size_t>(1, 3, 20, 200, 3000);
  while (!bytes.empty()) {
    const std::size_t size = std::min(bytes.size(), *inRange<std::size_t>(1, most + 1));
    out.push_back(bytes.substr(0, size));
    bytes.remove_prefix(size);
  }
  return out;
}

// The statuses, for the statistics.
std::string answers(std::string_view text) {
  std::string out;
  for (std::size_t at = 0; (at = text.find("HTTP/1.1 ", at)) != std::string_view::npos; at += 9) {
    out += std::string(text.substr(at + 9, 3)) + " ";
  }
  return out;
}

TEST(HttpPieces, AnswersDoNotDependOnCuts) {
  ::setenv("RC_PARAMS", "seed=7 max_success=1000 max_size=100", 0);
  PieceServer server;
  const bool held = rc::check("answers do not depend on cuts", [&] {
    const std::string bytes = draw_bytes();
    const PieceServer::Said whole = server.ask({bytes});
    const PieceServer::Said cut = server.ask(draw_cuts(bytes));
    RC_ASSERT(cut.text == whole.text);
    RC_ASSERT(cut.closed == whole.closed);
    RC_TAG(answers(whole.text));
  });
  EXPECT_TRUE(held);
}

TEST(HttpPieces, EveryCutOfSome) {
  PieceServer server;
  const std::string good =
      "POST /late?a=1 HTTP/1.1\r\nHost: a\r\nContent-Type: text/plain\r\nContent-Length: "
      "5\r\n\r\nhello"
      "\r\nPOST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: "
      "chunked\r\n\r\n3;x\r\nabc\r\n2\r\nde\r\n0\r\n"
      "T: x\r\n\r\nGET http://h/late?q HTTP/1.1\r\nHost: a\r\n\r\n";
  const PieceServer::Said expected = server.ask({good});
  EXPECT_NE(expected.text.find("POST /late?a=1 content-type=[text/plain] <hello>"),
            std::string::npos);
  EXPECT_NE(expected.text.find("POST / <abcde>"), std::string::npos);
  EXPECT_NE(expected.text.find("GET /late?q"), std::string::npos);
  EXPECT_FALSE(expected.closed);
  const std::string_view all = good;
  for (std::size_t at = 1; at < all.size(); ++at) {
    EXPECT_EQ(server.ask({all.substr(0, at), all.substr(at)}).text, expected.text) << at;
  }
  EXPECT_EQ(server.ask(pieces_of(good, 1)).text, expected.text);
}

}  // namespace
}  // namespace weir::node::test
