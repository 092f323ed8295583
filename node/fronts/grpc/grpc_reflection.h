#pragma once

#include <grpc/reflection/v1/reflection.pb.h>

#include <cstddef>
#include <map>
#include <string>
#include <string_view>
#include <vector>

namespace weir::node {

/// Which services and messages there are, for programs that ask (grpcurl, Postman): from the
/// schemas, which are part of the program.
class GrpcReflection {
 public:
  GrpcReflection();

  bool has_service(std::string_view name) const;
  void answer(const grpc::reflection::v1::ServerReflectionRequest& in,
              grpc::reflection::v1::ServerReflectionResponse& out) const;

 private:
  struct File {
    std::string bytes;  // a google.protobuf.FileDescriptorProto
    std::vector<std::string> imports;
  };
  /// That file and what it imports, each once. False if there is none of that name.
  bool add_files(const std::string& name, grpc::reflection::v1::FileDescriptorResponse& out) const;
  const std::string* file_of(std::string_view symbol) const;

  std::map<std::string, File, std::less<>> files_;
  std::map<std::string, std::string, std::less<>> symbols_;  // of services and messages: the file
  std::vector<std::string> services_;
};

}  // namespace weir::node
