// A reference to a callable: what std::function is for a callee that does not keep it, without the allocation.
#pragma once

#include <memory>
#include <type_traits>
#include <utility>

namespace latent_moe {

template <typename Signature>
class FunctionRef;

/// The callable must outlive every call.
template <typename Result, typename... Arguments>
class FunctionRef<Result(Arguments...)> {
public:
    FunctionRef() = default;

    template <typename Callable>
    requires(!std::is_same_v<std::remove_cvref_t<Callable>, FunctionRef>) FunctionRef(
        Callable&& callable)  // NOLINT(google-explicit-constructor): a lambda is passed where a FunctionRef is expected
        : object_(const_cast<void*>(static_cast<const void*>(std::addressof(callable)))),
          invoke_([](void* object, Arguments... arguments) -> Result {
              return (*static_cast<std::add_pointer_t<std::remove_reference_t<Callable>>>(object))(
                  std::forward<Arguments>(arguments)...);
          }) {}

    Result operator()(Arguments... arguments) const { return invoke_(object_, std::forward<Arguments>(arguments)...); }
    explicit operator bool() const noexcept { return invoke_ != nullptr; }

private:
    void* object_ = nullptr;
    Result (*invoke_)(void*, Arguments...) = nullptr;
};

}  // namespace latent_moe
