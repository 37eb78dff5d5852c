// What c10d's headers need of <ATen/ATen.h>, which is found after this one and has the compiler read all operators.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
