#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include <weir/crdt/time.h>
#include <weir/node/config.h>
#include <weir/node/log.h>
#include <weir/rpc/net/background.h>
#include <weir/rpc/net/tls_context.h>

namespace weir::node {

/// What is wrong with the TLS files of a configuration, with the field and the file; empty:
/// nothing.
std::string unusable_tls(const NodeConfig& config);

/// The TLS contexts of a node. Their files are looked at every two seconds and read again when one
/// changed; log lines say what was taken, what was refused (once for each reason), handshakes that
/// failed, and certificates that end in less than 30, 7 and 1 days, or have ended. For one thread,
/// but of() and what it gives are for any.
class Certificates {
 public:
  struct Use {
    std::string use;  ///< "peers", or a front's name
    rpc::TlsCounters counters;
    bool current = true;  ///< the files were taken when they were read last
    std::vector<rpc::TlsCertificate> certificates;
  };

  /// Reads the files. `log` and `background` outlive this; it is destroyed when the latter tells
  /// nobody anything any more.
  Certificates(const NodeConfig& config, Log& log, rpc::Background& background);

  /// Why they could not be read; empty: they could.
  const std::string& error() const { return error_; }
  /// Null: no TLS there.
  std::shared_ptr<rpc::TlsContext> of(std::string_view use) const;
  /// Call each second or so.
  void look(Nanos wall);
  /// Looks at the files now.
  void reread();
  std::vector<Use> uses() const;

 private:
  struct One {
    std::shared_ptr<rpc::TlsContext> context;
    bool refused = false;
    std::string why;                     // of the refusal, as it was told
    std::map<std::string, int> alarmed;  // by file: how near its end it was said to be
  };
  void alarm(Nanos wall);
  void told(const std::string& use, rpc::TlsContext::Refreshed result, const std::string& why);

  Log& log_;
  rpc::Background& background_;
  std::string error_;
  std::map<std::string, One, std::less<>> all_;
  Nanos looked_at_ = 0;
  bool busy_ = false;
};

}  // namespace weir::node
