# weir_library(crdt SOURCES ... HEADERS ... PUBLIC ... PRIVATE ...)
#   defines weir_crdt (alias weir::crdt), with warnings, include paths and install rules.
function(weir_library name)
  cmake_parse_arguments(ARG "" "" "SOURCES;HEADERS;PUBLIC;PRIVATE" ${ARGN})
  file(RELATIVE_PATH folder ${PROJECT_SOURCE_DIR} ${CMAKE_CURRENT_SOURCE_DIR})
  add_library(weir_${name} STATIC ${ARG_SOURCES})
  add_library(weir::${name} ALIAS weir_${name})
  set_target_properties(weir_${name} PROPERTIES EXPORT_NAME ${name})
  target_compile_features(weir_${name} PUBLIC cxx_std_20)
  target_include_directories(weir_${name} PUBLIC
    $<BUILD_INTERFACE:${PROJECT_BINARY_DIR}/include> $<INSTALL_INTERFACE:${CMAKE_INSTALL_INCLUDEDIR}>)
  target_link_libraries(weir_${name} PUBLIC ${ARG_PUBLIC} PRIVATE ${ARG_PRIVATE})
  weir_warnings(weir_${name})
  install(TARGETS weir_${name} EXPORT weirTargets ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR})
  foreach(header ${ARG_HEADERS})
    cmake_path(GET header PARENT_PATH room)
    install(FILES ${header} DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}/weir/${folder}/${room})
  endforeach()
endfunction()

function(weir_warnings target)
  # GCC 12 takes inactive members of std::variant and std::optional for uninitialised at -O2, and at -O3 "a" + std::string
  # for a copy that overlaps itself (GCC's bug 105651).
  target_compile_options(${target} PRIVATE -Wall -Wextra -Wpedantic -Wshadow -Wconversion -Wno-sign-conversion
    -Wnon-virtual-dtor -Woverloaded-virtual $<$<CXX_COMPILER_ID:GNU>:-Wno-maybe-uninitialized>
    $<$<AND:$<CXX_COMPILER_ID:GNU>,$<CONFIG:Release>>:-Wno-restrict>
    $<$<BOOL:${WEIR_WERROR}>:-Werror>)
endfunction()

# weir_program(weir-node SOURCES ... LINK ... [INSTALL])
function(weir_program name)
  cmake_parse_arguments(ARG "INSTALL" "" "SOURCES;LINK" ${ARGN})
  add_executable(${name} ${ARG_SOURCES})
  target_link_libraries(${name} PRIVATE ${ARG_LINK})
  weir_warnings(${name})
  if(ARG_INSTALL)
    install(TARGETS ${name} RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR})
  endif()
endfunction()

# weir_test(series/series_memo_test SOURCES ... LINK ... [TIMEOUT seconds] [LABELS ...] [ENVIRONMENT ...])
#   one ctest entry per program, named without its folder; sources default to <path>.cc
function(weir_test path)
  if(NOT WEIR_BUILD_TESTS)
    return()
  endif()
  cmake_parse_arguments(ARG "" "TIMEOUT" "SOURCES;LINK;LABELS;ENVIRONMENT" ${ARGN})
  if(NOT ARG_SOURCES)
    set(ARG_SOURCES ${path}.cc)
  endif()
  if(NOT ARG_TIMEOUT)
    set(ARG_TIMEOUT 120)
  endif()
  cmake_path(GET path FILENAME name)
  add_executable(${name} ${ARG_SOURCES})
  target_link_libraries(${name} PRIVATE ${ARG_LINK} GTest::gtest GTest::gtest_main GTest::gmock)
  weir_warnings(${name})
  # Tests are about the libraries, which UBSan watches. Of these programs it would watch the templates of the libraries
  # for testing, which takes half of the time that they take to build.
  if(WEIR_SANITIZE)
    target_compile_options(${name} PRIVATE -fno-sanitize=undefined)
  endif()
  add_test(NAME ${name} COMMAND ${name})
  set_tests_properties(${name} PROPERTIES TIMEOUT ${ARG_TIMEOUT} LABELS "${ARG_LABELS}" ENVIRONMENT "${ARG_ENVIRONMENT}")
endfunction()

# weir_fuzz(net/fuzz_tls LINK ...): a libFuzzer target of <path>.cc, for scripts/fuzz; only with WEIR_FUZZ
function(weir_fuzz path)
  if(NOT WEIR_FUZZ)
    return()
  endif()
  cmake_parse_arguments(ARG "" "" "LINK" ${ARGN})
  cmake_path(GET path FILENAME name)
  add_executable(${name} ${path}.cc)
  set_target_properties(${name} PROPERTIES RUNTIME_OUTPUT_DIRECTORY ${PROJECT_BINARY_DIR}/fuzz)
  target_link_libraries(${name} PRIVATE ${ARG_LINK})
  target_link_options(${name} PRIVATE -fsanitize=fuzzer)
  weir_warnings(${name})
endfunction()

# find_package(weir) and pkg-config from an install prefix.
function(weir_install_package)
  set(dir ${CMAKE_INSTALL_LIBDIR}/cmake/weir)
  install(EXPORT weirTargets NAMESPACE weir:: DESTINATION ${dir})
  configure_package_config_file(${PROJECT_SOURCE_DIR}/scripts/cmake/weirConfig.cmake.in
    ${PROJECT_BINARY_DIR}/weirConfig.cmake INSTALL_DESTINATION ${dir})
  write_basic_package_version_file(${PROJECT_BINARY_DIR}/weirConfigVersion.cmake COMPATIBILITY SameMinorVersion)
  install(FILES ${PROJECT_BINARY_DIR}/weirConfig.cmake ${PROJECT_BINARY_DIR}/weirConfigVersion.cmake DESTINATION ${dir})
  # Relative, so that cmake --install --prefix works.
  file(RELATIVE_PATH WEIR_PC_TO_PREFIX /prefix/${CMAKE_INSTALL_LIBDIR}/pkgconfig /prefix)
  configure_file(${PROJECT_SOURCE_DIR}/scripts/cmake/weir.pc.in ${PROJECT_BINARY_DIR}/weir.pc @ONLY)
  install(FILES ${PROJECT_BINARY_DIR}/weir.pc DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig)
endfunction()
