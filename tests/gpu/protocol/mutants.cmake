# Faults that the checker must find. mutant(NAME FILE FROM TO MODEL FOUND): in src/gpu/FILE every FROM becomes TO (there must be
# one); the line of MODEL must then say FOUND, a regular expression.
mutant(a_header_sent_without_its_release primitives/header.h
    [[    fence<Scope::system>();
    if (lane < x.window.world]] [[    if (lane < x.window.world]]
    fused_tail "overwritten: .* in no order")
mutant(a_header_taken_without_its_acquire primitives/header.h
    [[    fence<Scope::system>();
}]] [[}]]
    fused_tail "overwritten: .* in no order")
mutant(headers_that_order_nothing primitives/header.h
    [[    fence<Scope::system>();]] [[]]
    all_reduce_in_one_stage "overwritten: ")
mutant(one_slot_fewer primitives/window.h
    [[slots = 3;]] [[slots = 2;]]
    fused_tail "overwritten: .* in no order")
mutant(a_region_of_one_slot_fewer kernels/fused_tail_mailboxes.cuh
    [[slots - 1]] [[slots - 2]]
    fused_tail "overwritten: .* in no order")
mutant(rearming_the_rows_of_this_call_only kernels/fused_tail_mailboxes.cuh
    [[state.rows_before() *]] [[static_cast<std::uint32_t>(p.tokens) *]]
    fused_tail "(overwritten|wrong|fault): ")
mutant(a_mailbox_that_is_not_armed_again primitives/mailbox.h
    [[store_relaxed(boxes[i], U::sentinel());]] [[]]
    all_reduce_in_one_stage "(overwritten|wrong|fault): ")
mutant(a_header_of_any_call_taken_for_this_calls primitives/header.h
    [[theirs.x != mine.epoch + 1]] [[theirs.x == 0]]
    fused_tail "fault: ")
mutant(a_unit_taken_when_its_first_word_came primitives/numeric.h
    [[v.x != E::sentinel && v.y != E::sentinel && v.z != E::sentinel && v.w != E::sentinel]] [[v.x != E::sentinel]]
    all_reduce_in_one_stage "(overwritten|wrong|fault): ")
mutant(data_sent_at_device_scope primitives/mailbox.h
    [[store_relaxed(to, canonical);]] [[store_relaxed<Scope::device>(to, canonical);]]
    all_reduce_in_two_stages "scope: ")
mutant(the_sentinel_sent_as_data kernels/all_reduce.cuh
    [[return U::canonical(load16(p.x.at(i / p.row_units, i % p.row_units)));]]
    [[return load16(p.x.at(i / p.row_units, i % p.row_units));]]
    all_reduce_in_one_stage "LIVELOCK")
