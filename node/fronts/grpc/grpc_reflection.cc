#include <weir/node/fronts/grpc/grpc_reflection.h>

#include <weir/internal/files.pb.h>

#include <algorithm>
#include <set>

#include <weir/node/fronts/grpc/grpc_server.h>

namespace weir::node {

/// A google.protobuf.FileDescriptorSet of all that CMake compiled; made by it.
extern const unsigned char kGrpcFiles[];
extern const std::size_t kGrpcFilesSize;

GrpcReflection::GrpcReflection() {
  internal::FileSet set;
  if (!set.ParseFromArray(kGrpcFiles, static_cast<int>(kGrpcFilesSize))) return;
  for (const std::string& bytes : set.file()) {
    internal::File file;
    if (!file.ParseFromString(bytes)) continue;
    const auto full = [&](const internal::Named& named) {
      return file.package() + "." + named.name();
    };
    for (const auto& message : file.message_type()) symbols_[full(message)] = file.name();
    for (const auto& names : file.enum_type()) symbols_[full(names)] = file.name();
    for (const auto& service : file.service()) {
      symbols_[full(service)] = file.name();
      services_.push_back(full(service));
    }
    files_[file.name()] = {bytes, {file.dependency().begin(), file.dependency().end()}};
  }
}

bool GrpcReflection::has_service(std::string_view name) const {
  return std::find(services_.begin(), services_.end(), name) != services_.end();
}

const std::string* GrpcReflection::file_of(std::string_view symbol) const {
  // A method or a nested message stands in the file of what it is part of.
  while (!symbol.empty()) {
    if (const auto at = symbols_.find(symbol); at != symbols_.end()) return &at->second;
    const std::size_t dot = symbol.rfind('.');
    symbol = symbol.substr(0, dot == symbol.npos ? 0 : dot);
  }
  return nullptr;
}

bool GrpcReflection::add_files(const std::string& name,
                               grpc::reflection::v1::FileDescriptorResponse& out) const {
  std::vector<std::string> wanted = {name};
  std::set<std::string> seen = {name};
  for (std::size_t i = 0; i < wanted.size(); ++i) {
    const auto at = files_.find(wanted[i]);
    if (at == files_.end()) return false;
    out.add_file_descriptor_proto(at->second.bytes);
    for (const std::string& other : at->second.imports) {
      if (seen.insert(other).second) wanted.push_back(other);
    }
  }
  return true;
}

void GrpcReflection::answer(const grpc::reflection::v1::ServerReflectionRequest& in,
                            grpc::reflection::v1::ServerReflectionResponse& out) const {
  using Asked = grpc::reflection::v1::ServerReflectionRequest;
  out.set_valid_host(in.host());
  *out.mutable_original_request() = in;
  const auto fail = [&](GrpcCode code, const char* why) {
    out.mutable_error_response()->set_error_code(static_cast<int>(code));
    out.mutable_error_response()->set_error_message(why);
  };
  switch (in.message_request_case()) {
    case Asked::kFileByFilename:
      if (!add_files(in.file_by_filename(), *out.mutable_file_descriptor_response())) {
        fail(GrpcCode::not_found, "there is no such file");
      }
      return;
    case Asked::kFileContainingSymbol: {
      const std::string* file = file_of(in.file_containing_symbol());
      if (file == nullptr) return fail(GrpcCode::not_found, "there is no such symbol");
      add_files(*file, *out.mutable_file_descriptor_response());
      return;
    }
    case Asked::kListServices:
      for (const std::string& name : services_) {
        out.mutable_list_services_response()->add_service()->set_name(name);
      }
      return;
    case Asked::kFileContainingExtension:
    case Asked::kAllExtensionNumbersOfType:
      return fail(GrpcCode::not_found, "there are no extensions");
    default:
      fail(GrpcCode::invalid_argument, "nothing was asked");
  }
}

}  // namespace weir::node
