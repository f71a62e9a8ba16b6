// Parser and printer of the case text form (cases.h).
//
// One table of keys serves both directions: each key knows how to set its field from a word and how
// to print it. A line is split into words, lists are expanded to their product, and every
// combination is resolved (defaults that depend on other keys) and checked on its own.
#include "support/cases.h"

#include <algorithm>
#include <charconv>
#include <cstdlib>
#include <fstream>
#include <functional>
#include <set>
#include <sstream>
#include <utility>

#include "support/half.h"

namespace evenkeel::support {
namespace {

template <typename T>
using Names = std::vector<std::pair<const char*, T>>;

const Names<ek_op> kOps = {
    {"layer_norm", EK_LAYER_NORM}, {"rms_norm", EK_RMS_NORM}, {"group_norm", EK_GROUP_NORM}};
const Names<ek_dtype> kDtypes = {
    {"f32", EK_F32}, {"f64", EK_F64}, {"f16", EK_F16}, {"bf16", EK_BF16}};
const Names<ek_dtype> kYDtypes = {{"f32", EK_F32},   {"f64", EK_F64},      {"f16", EK_F16},
                                  {"bf16", EK_BF16}, {"e4m3", EK_F8_E4M3}, {"e5m2", EK_F8_E5M2},
                                  {"i8", EK_I8}};
const Names<YScale> kYScales = {{"rows", YScale::kRows}, {"tensor", YScale::kTensor}};
const Names<ek_layout> kLayouts = {{"nchw", EK_NCHW}, {"nhwc", EK_NHWC}};
const Names<ek_casting> kCastings = {
    {"none", EK_CASTING_NONE}, {"llama", EK_CASTING_LLAMA}, {"gemma", EK_CASTING_GEMMA}};
const Names<ek_activation> kActivations = {{"none", EK_ACTIVATION_NONE},
                                           {"silu", EK_ACTIVATION_SILU},
                                           {"relu", EK_ACTIVATION_RELU},
                                           {"gelu", EK_ACTIVATION_GELU},
                                           {"gelu_tanh", EK_ACTIVATION_GELU_TANH}};
const Names<InPlace> kInPlaces = {{"none", InPlace::kNone},
                                  {"dy", InPlace::kDy},
                                  {"x", InPlace::kX},
                                  {"residual", InPlace::kResidual},
                                  {"sum", InPlace::kSum}};
const Names<bool> kYesNo = {{"yes", true}, {"no", false}};
const Names<Values> kValues = {{"normal", Values::kNormal},
                               {"mean1e4", Values::kMean1e4},
                               {"outlier_first", Values::kOutlierFirst},
                               {"constant", Values::kConstant},
                               {"zero", Values::kZero},
                               {"nan", Values::kNan},
                               {"inf", Values::kInf},
                               {"nan_dy", Values::kNanDy},
                               {"denormal", Values::kDenormal},
                               {"zero_weight", Values::kZeroWeight},
                               {"huge", Values::kHuge}};

enum class Pass { kBoth, kForward, kBackward };
const Names<Pass> kPasses = {
    {"both", Pass::kBoth}, {"forward", Pass::kForward}, {"backward", Pass::kBackward}};

template <typename T>
T find(const Names<T>& names, const std::string& word) {
  std::string known;
  for (const auto& [name, value] : names) {
    if (word == name) return value;
    known += std::string(known.empty() ? "" : ", ") + name;
  }
  throw CaseError("'" + word + "' is not one of " + known);
}

template <typename T>
const char* print(const Names<T>& names, T value) {
  for (const auto& [name, candidate] : names) {
    if (candidate == value) return name;
  }
  return "?";
}

int64_t parse_integer(const std::string& word) {
  int64_t value = 0;
  const auto [end, error] = std::from_chars(word.data(), word.data() + word.size(), value);
  if (error != std::errc() || end != word.data() + word.size()) {
    throw CaseError("'" + word + "' is not an integer");
  }
  if (value < 0) throw CaseError("'" + word + "' is negative");
  return value;
}

double parse_number(const std::string& word) {
  char* end = nullptr;
  const double value = std::strtod(word.c_str(), &end);
  if (word.empty() || *end != '\0') throw CaseError("'" + word + "' is not a number");
  return value;
}

std::string print_number(double value) {
  char text[32];
  const auto result = std::to_chars(text, text + sizeof text, value);
  return std::string(text, result.ptr);
}

struct Key {
  std::string name;
  std::function<void(Case&, const std::string&)> set;
  std::function<std::string(const Case&)> print;
};

template <typename T>
Key integer_key(const char* name, T Case::*field) {
  return {name,
          [=](Case& c, const std::string& word) { c.*field = static_cast<T>(parse_integer(word)); },
          [=](const Case& c) { return std::to_string(c.*field); }};
}

Key number_key(const char* name, double Case::*field) {
  return {name, [=](Case& c, const std::string& word) { c.*field = parse_number(word); },
          [=](const Case& c) { return print_number(c.*field); }};
}

template <typename T>
Key word_key(const char* name, const Names<T>& names, T Case::*field) {
  return {name, [=, &names](Case& c, const std::string& word) { c.*field = find(names, word); },
          [=, &names](const Case& c) { return std::string(support::print(names, c.*field)); }};
}

// A type; `none` (where it is allowed) for an absent tensor or vector.
template <typename Spec>
Key dtype_key(const char* name, Spec Case::*field, bool optional) {
  return {name,
          [=](Case& c, const std::string& word) {
            (c.*field).present = !(optional && word == "none");
            if ((c.*field).present) (c.*field).dtype = find(kDtypes, word);
          },
          [=](const Case& c) {
            return std::string((c.*field).present ? name_of((c.*field).dtype) : "none");
          }};
}

template <typename Spec>
Key stride_key(const std::string& name, Spec Case::*field, int64_t Spec::*stride) {
  return {name, [=](Case& c, const std::string& word) { (c.*field).*stride = parse_integer(word); },
          [=](const Case& c) { return std::to_string((c.*field).*stride); }};
}

const std::vector<Key>& keys() {
  static const std::vector<Key> table = [] {
    std::vector<Key> all = {
        integer_key("rows", &Case::rows),
        integer_key("cols", &Case::cols),
        integer_key("inner_rows", &Case::inner_rows),
        integer_key("samples", &Case::samples),
        integer_key("channels", &Case::channels),
        integer_key("spatial", &Case::spatial),
        integer_key("groups", &Case::groups),
        word_key("layout", kLayouts, &Case::layout),
        dtype_key("x", &Case::x, false),
        {"y", [](Case& c, const std::string& word) { c.y.dtype = find(kYDtypes, word); },
         [](const Case& c) { return std::string(support::print(kYDtypes, c.y.dtype)); }},
        word_key("y_scale", kYScales, &Case::y_scale),
        number_key("amax_bound", &Case::amax_bound),
        dtype_key("dy", &Case::dy, false),
        dtype_key("dx", &Case::dx, true),
        dtype_key("residual", &Case::residual, true),
        dtype_key("sum", &Case::sum, true),
        dtype_key("dsum", &Case::dsum, true),
        dtype_key("dresidual", &Case::dresidual, true),
        dtype_key("weight", &Case::weight, true),
        dtype_key("bias", &Case::bias, true),
        dtype_key("dweight", &Case::dweight, true),
        dtype_key("dbias", &Case::dbias, true),
        dtype_key("scale", &Case::scale, true),
        dtype_key("shift", &Case::shift, true),
        dtype_key("dscale", &Case::dscale, true),
        dtype_key("dshift", &Case::dshift, true),
        word_key("mean", kYesNo, &Case::mean),
        word_key("rstd", kYesNo, &Case::rstd),
        number_key("eps", &Case::eps),
        number_key("offset", &Case::offset),
        word_key("casting", kCastings, &Case::casting),
        word_key("activation", kActivations, &Case::activation),
        word_key("in_place", kInPlaces, &Case::in_place),
        integer_key("misalign", &Case::misalign),
        word_key("values", kValues, &Case::values),
        integer_key("seed", &Case::seed),
        {"pass",
         [](Case& c, const std::string& word) {
           const Pass pass = find(kPasses, word);
           c.forward = pass != Pass::kBackward;
           c.backward = pass != Pass::kForward;
         },
         [](const Case& c) {
           return std::string(support::print(kPasses, !c.backward  ? Pass::kForward
                                                      : !c.forward ? Pass::kBackward
                                                                   : Pass::kBoth));
         }},
    };
    const std::pair<const char*, TensorSpec Case::*> tensors[] = {{"x", &Case::x},
                                                                  {"y", &Case::y},
                                                                  {"dy", &Case::dy},
                                                                  {"dx", &Case::dx},
                                                                  {"residual", &Case::residual},
                                                                  {"sum", &Case::sum},
                                                                  {"dsum", &Case::dsum},
                                                                  {"dresidual", &Case::dresidual}};
    for (const auto& [name, field] : tensors) {
      all.push_back(stride_key(std::string(name) + "_row_stride", field, &TensorSpec::row_stride));
      all.push_back(
          stride_key(std::string(name) + "_outer_stride", field, &TensorSpec::outer_stride));
    }
    const std::pair<const char*, SampleSpec Case::*> of_samples[] = {{"scale", &Case::scale},
                                                                     {"shift", &Case::shift},
                                                                     {"dscale", &Case::dscale},
                                                                     {"dshift", &Case::dshift}};
    for (const auto& [name, field] : of_samples)
      all.push_back(stride_key(std::string(name) + "_stride", field, &SampleSpec::stride));
    return all;
  }();
  return table;
}

const Key& key_named(const std::string& name) {
  std::string known;
  for (const Key& key : keys()) {
    if (key.name == name) return key;
    known += " " + key.name;
  }
  throw CaseError("unknown key; known are:" + known);
}

// Fills in the defaults that depend on other keys; `given` are the keys that the line names.
void resolve(Case& c, const std::set<std::string>& given) {
  const auto unset = [&](const char* key) { return !given.count(key); };
  const bool y_follows = c.in_place == InPlace::kDy || c.in_place == InPlace::kX;
  const bool sum_over_x = c.in_place == InPlace::kSum;
  if (unset("sum")) c.sum.present = c.residual.present;
  if (unset("sum") || !c.sum.present) c.sum.dtype = sum_over_x ? c.x.dtype : c.residual.dtype;
  if (unset("y")) c.y.dtype = c.x.dtype;
  if (unset("dy")) c.dy.dtype = quantizes(c) ? c.x.dtype : c.y.dtype;
  if (unset("pass") && quantizes(c)) c.backward = false;
  if (unset("dx")) {
    c.dx.dtype = c.in_place == InPlace::kDy ? c.dy.dtype : sum_over_x ? c.dsum.dtype : c.x.dtype;
  }
  const auto follow = [&](TensorSpec& tensor, const std::string& name, const TensorSpec& leader) {
    if (unset((name + "_row_stride").c_str())) tensor.row_stride = leader.row_stride;
    if (unset((name + "_outer_stride").c_str())) tensor.outer_stride = leader.outer_stride;
  };
  if (y_follows) {
    follow(c.y, "y", c.x);
    follow(c.dx, "dx", c.in_place == InPlace::kDy ? c.dy : normalized(c));
  }
  if (sum_over_x) {
    follow(c.sum, "sum", c.x);
    follow(c.dx, "dx", c.dsum);
  }
  if (c.in_place == InPlace::kResidual) {
    follow(c.sum, "sum", c.residual);
    follow(c.dresidual, "dresidual", c.dsum);
  }
  if (unset("bias")) c.bias.present = c.op != EK_RMS_NORM;
  if (unset("dweight")) c.dweight = c.weight;
  if (unset("dbias")) c.dbias = c.bias;
  const auto gradient = [&](SampleSpec& of, const char* name, const SampleSpec& leader) {
    if (unset(name)) of.dtype = leader.dtype, of.present = leader.present;
  };
  gradient(c.dscale, "dscale", c.scale);
  gradient(c.dshift, "dshift", c.shift);
  if (unset("samples") && c.op != EK_GROUP_NORM) c.samples = modulates(c) ? 1 : 0;
  if (unset("mean")) c.mean = c.op != EK_RMS_NORM;
}

void check(const Case& c, const std::set<std::string>& given) {
  const bool group = c.op == EK_GROUP_NORM;
  const auto require = [&](const char* key) {
    if (!given.count(key)) throw CaseError("it must be given for this operation");
  };
  const auto refuse = [&](const char* key) {
    if (given.count(key)) throw CaseError("it has no meaning for this operation");
  };
  const auto named = [](const char* key, const auto& test) {
    try {
      test(key);
    } catch (const CaseError& error) {
      throw CaseError(std::string(key) + ": " + error.what());
    }
  };
  for (const char* key : {"rows", "cols"}) group ? named(key, refuse) : named(key, require);
  for (const char* key : {"channels", "spatial", "groups"}) {
    group ? named(key, require) : named(key, refuse);
  }
  if (group) named("samples", require);
  if (!group && !modulates(c)) named("samples", refuse);
  if (!group && modulates(c) && (c.samples < 1 || c.rows % c.samples != 0))
    throw CaseError("samples: it must divide rows");
  for (const char* key : {"inner_rows", "residual", "sum", "dsum", "dresidual", "scale", "shift",
                          "dscale", "dshift"}) {
    if (group) named(key, refuse);
  }
  if (group && quantizes(c)) throw CaseError("y: group norm does not quantize");
  if (c.backward && quantizes(c)) throw CaseError("pass: a quantized y has no gradient");
  if (!quantizes(c)) {
    for (const char* key : {"y_scale", "amax_bound"}) named(key, refuse);
  }
  if (c.amax_bound != 0 && c.y_scale == YScale::kTensor)
    throw CaseError("amax_bound: only scales of rows have one");
  if (c.sum.present && !c.residual.present) throw CaseError("sum: there is none without residual");
  if (group && (c.groups < 1 || c.channels % c.groups != 0)) {
    throw CaseError("groups: it must divide channels");
  }
  const auto same = [](const TensorSpec& a, const TensorSpec& b) {
    return a.dtype == b.dtype && a.row_stride == b.row_stride && a.outer_stride == b.outer_stride;
  };
  const auto in_place = [&](const char* output, const TensorSpec& out, const char* input,
                            const TensorSpec& in) {
    if (!out.present || (in.present && same(out, in))) return;
    throw CaseError(std::string("in_place: ") + output + " differs from " + input +
                    " in type or strides");
  };
  switch (c.in_place) {
    case InPlace::kNone:
      break;
    case InPlace::kDy:
      in_place("y", c.y, "x", c.x);
      in_place("dx", c.dx, "dy", c.dy);
      break;
    case InPlace::kX:
      in_place("y", c.y, "x", c.x);
      in_place("dx", c.dx, "x", normalized(c));
      break;
    case InPlace::kResidual:
      in_place("sum", c.sum, "residual", c.residual);
      in_place("dresidual", c.dresidual, "dsum", c.dsum);
      break;
    case InPlace::kSum:
      in_place("sum", c.sum, "x", c.x);
      in_place("dx", c.dx, "dsum", c.dsum);
      break;
  }
}

std::vector<std::string> split(std::string_view text, const char* separators) {
  std::vector<std::string> parts;
  size_t at = 0;
  while ((at = text.find_first_not_of(separators, at)) != std::string_view::npos) {
    const size_t end = std::min(text.find_first_of(separators, at), text.size());
    parts.emplace_back(text.substr(at, end - at));
    at = end;
  }
  return parts;
}

// All cases of one line; the last list of the line varies fastest.
void expand(const std::vector<std::string>& words, std::string& current, std::vector<Case>& out) {
  current = words[0];
  Case first;
  first.op = find(kOps, words[0]);
  std::vector<Case> cases = {first};
  std::set<std::string> given;
  for (size_t i = 1; i < words.size(); ++i) {
    current = words[i];
    const size_t equals = words[i].find('=');
    if (equals == std::string::npos) throw CaseError("expected key=value");
    const std::string name = words[i].substr(0, equals);
    const Key& key = key_named(name);
    if (!given.insert(name).second) throw CaseError("the key is given twice");
    const std::vector<std::string> values =
        split(std::string_view(words[i]).substr(equals + 1), ",");
    if (values.empty()) throw CaseError("expected a value");
    std::vector<Case> product;
    for (const Case& c : cases) {
      for (const std::string& value : values) {
        product.push_back(c);
        key.set(product.back(), value);
      }
    }
    cases = std::move(product);
  }
  current = words[0];
  for (Case& c : cases) {
    resolve(c, given);
    check(c, given);
    out.push_back(c);
  }
}

}  // namespace

std::vector<Case> parse_cases(std::string_view text, const std::string& name) {
  std::vector<Case> cases;
  int line_number = 0;
  while (!text.empty()) {
    ++line_number;
    const size_t end = std::min(text.find('\n'), text.size());
    const std::string_view line = text.substr(0, std::min(text.find('#'), end));
    text.remove_prefix(std::min(end + 1, text.size()));
    const std::vector<std::string> words = split(line, " \t\r");
    if (words.empty()) continue;
    std::string current;
    try {
      expand(words, current, cases);
    } catch (const CaseError& error) {
      throw CaseError(name + ":" + std::to_string(line_number) + ": " + current + ": " +
                      error.what());
    }
  }
  return cases;
}

std::vector<Case> read_cases(const std::string& path) {
  std::ifstream file(path);
  if (!file) throw CaseError(path + ": cannot be read");
  std::stringstream text;
  text << file.rdbuf();
  return parse_cases(text.str(), path);
}

Case parse_case(std::string_view line) {
  const std::vector<Case> cases = parse_cases(line, "case");
  if (cases.size() != 1) {
    throw CaseError("'" + std::string(line) + "' is not one case but " +
                    std::to_string(cases.size()));
  }
  return cases[0];
}

std::string to_string(const Case& c) {
  // Key by key: it is printed if the case as printed so far would have another value there. Keys
  // come before those whose defaults they decide, but for in_place, which is therefore tried first.
  std::string line = print(kOps, c.op);
  std::set<std::string> given;
  Case so_far;
  so_far.op = c.op;
  const auto add = [&](const Key& key) {
    Case plain = so_far;
    resolve(plain, given);
    const std::string word = key.print(c);
    const bool size = (c.op == EK_GROUP_NORM) ? key.name == "samples" || key.name == "channels" ||
                                                    key.name == "spatial" || key.name == "groups"
                                              : key.name == "rows" || key.name == "cols";
    if (given.count(key.name) || (!size && key.print(plain) == word)) return;
    line += " " + key.name + "=" + word;
    key.set(so_far, word);
    given.insert(key.name);
  };
  for (const Key& key : keys()) add(key);
  for (const Key& key : keys()) add(key);  // what in_place, a late key, has changed
  return line;
}

int64_t unit_count(const Case& c) { return c.op == EK_GROUP_NORM ? c.samples * c.groups : c.rows; }

int64_t unit_size(const Case& c) {
  return c.op == EK_GROUP_NORM ? c.channels / c.groups * c.spatial : c.cols;
}

bool modulates(const Case& c) {
  return c.scale.present || c.shift.present || c.dscale.present || c.dshift.present;
}

int64_t sample_count(const Case& c) { return modulates(c) ? c.samples : 1; }

int64_t parameter_count(const Case& c) { return c.op == EK_GROUP_NORM ? c.channels : c.cols; }

int64_t element_count(const Case& c) {
  return c.op == EK_GROUP_NORM ? c.samples * c.channels * c.spatial : c.rows * c.cols;
}

TensorSpec normalized(const Case& c) {
  if (!c.residual.present) return c.x;
  TensorSpec spec = c.sum;
  spec.present = true;
  return spec;
}

bool computes_in_f64(const Case& c, bool backward) {
  const auto wide = [](const auto& spec) { return spec.present && spec.dtype == EK_F64; };
  const bool tensors = backward ? wide(c.dy) || wide(c.dx) || wide(c.dsum) || wide(c.dresidual)
                                : wide(c.y) || wide(c.x) || wide(c.residual);
  return tensors || wide(normalized(c)) || wide(c.weight) || wide(c.bias) || wide(c.scale) ||
         wide(c.shift);
}

bool quantizes(const Case& c) { return size_of(c.y.dtype) == 1; }

ek_problem problem_of(const Case& c) {
  ek_problem problem = EK_PROBLEM_INIT;
  problem.op = c.op;
  problem.layout = c.layout;
  problem.activation = c.activation;
  problem.casting = c.casting;
  problem.rows = c.rows;
  problem.cols = c.cols;
  problem.inner_rows = c.inner_rows;
  problem.samples = c.samples;
  problem.channels = c.channels;
  problem.spatial = c.spatial;
  problem.groups = c.groups;
  problem.eps = c.eps;
  problem.weight_offset = c.offset;
  return problem;
}

}  // namespace evenkeel::support
