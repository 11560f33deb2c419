// Tensors read in C++: through the table of C functions that a class may hand over as `__dlpack_c_exchange_api__`
// (DLPack 1.3; PyTorch has it since December 2025). It takes 0.15 µs a tensor, where the Python methods of one take more
// than a microsecond.
#pragma once

#include <nanobind/nanobind.h>

#include <array>
#include <cstddef>
#include <cstdint>

namespace latent_moe::python {

/// What DLPack says of a tensor. Shape and strides are the tensor's own.
struct DlTensor {
    void* data;
    std::int32_t device_type;
    std::int32_t device_id;
    std::int32_t dimensions;
    std::uint8_t code;
    std::uint8_t bits;
    std::uint16_t lanes;
    std::int64_t* shape;
    std::int64_t* strides;
    std::uint64_t byte_offset;
};

/// The table, as DLPack lays it out. Functions return 0, or else a Python error is set. None of them waits for a stream.
struct ExchangeTable {
    std::uint32_t major;
    std::uint32_t minor;
    const ExchangeTable* previous;
    void* allocate;
    void* to_managed;
    void* from_managed;
    int (*describe)(void* object, DlTensor* tensor);  ///< may be null
    int (*current_stream)(std::int32_t device_type, std::int32_t device_id, void** stream);
};

inline constexpr std::int32_t dl_cpu = 1;
inline constexpr std::int32_t dl_cuda = 2;

/// The classes whose objects are read through their table: exactly these, since a class that inherits it may be a tensor
/// without memory.
class TensorClasses {
public:
    /// False: the table is of a kind that is not known here, or there is no place left.
    bool add(nanobind::handle type, const ExchangeTable* table) {
        if (count_ == classes_.size() || table == nullptr || table->major != 1 || table->describe == nullptr) return false;
        classes_[count_++] = {type.inc_ref().ptr(), table};  // a class of a module lives as long as the process
        return true;
    }
    /// Null for an object of another class.
    const ExchangeTable* table_of(nanobind::handle object) const noexcept {
        auto* const type = reinterpret_cast<PyObject*>(Py_TYPE(object.ptr()));
        for (std::size_t index = 0; index < count_; ++index)
            if (classes_[index].type == type) return classes_[index].table;
        return nullptr;
    }

private:
    struct Class {
        PyObject* type;
        const ExchangeTable* table;
    };
    std::array<Class, 2> classes_{};
    std::size_t count_ = 0;
};

}  // namespace latent_moe::python
