// Two launches with every edge: rank 0 is the home of one token, rank 1 has its expert. One row, one tile a
// GEMM.
#include "scenarios.h"

namespace model {
namespace {

struct Phase {  // CTA-level barriers of one launch
    int full1, full2, output1, output2, empty, boundary0, boundary1, planned;
};

void whole_launch(World& w, const Flaw& flaw) {
    std::array<std::array<int, 2>, 2> ids, epoch_cell, tokens, hash;
    for (int r = 0; r < 2; ++r) {
        for (int p = 0; p < 2; ++p) {
            ids[r][p] = w.payload(name_of("ids", r, p)),
            epoch_cell[r][p] = w.cell(name_of("route_epoch", r, p));
            tokens[r][p] = w.cell(name_of("route_tokens", r, p)),
            hash[r][p] = w.cell(name_of("route_hash", r, p));
        }
    }
    int x = w.payload("x"), staged = w.cell("staged"), partial = w.payload("partial"),
        ready = w.cell("partial_ready");
    int row = w.payload("x_pool row"), h = w.payload("h"), h_scale = w.payload("h_scale"),
        y_row = w.payload("y_row");
    int rows_ready = w.cell("rows_ready"), done1 = w.cell("gemm1_done"), done2 = w.cell("gemm2_done");
    int arrivals = w.cell("arrivals"), generation = w.cell("generation"), plan = w.payload("plan");
    int tile = w.payload("operand in shared memory", true), chunk = w.payload("chunk", true);
    constexpr uint32_t launches = 2;
    std::array<Phase, launches + 1> phase;
    for (uint32_t e = 1; e <= launches; ++e) {
        phase[e] = {w.barrier("full gemm1", 1),        w.barrier("full gemm2", 1),
                    w.barrier("output_full gemm1", 1), w.barrier("output_full gemm2", 1),
                    w.barrier("output_empty", 1),      w.barrier("launch boundary 0", 1),
                    w.barrier("launch boundary 1", 5), w.barrier("cta_sync plan", 4)};
    }
    bool zeroed = !flaw("counters are not zeroed"), waits = !flaw("combine does not wait");
    uint32_t parities = flaw("one parity") ? 1 : 2;

    auto exchange = [=](Mem& m, int r, uint32_t epoch) {
        uint32_t p = epoch % parities;
        m.write(ids[r][p], epoch);
        RoutesReady::publish(m, epoch_cell[r][p], tokens[r][p], hash[r][p], epoch, 1, 77);
        if (r == 0) {
            m.write(x, epoch);
            XReady::publish(m, staged, epoch);
        }
        RoutesReady::await(m, epoch_cell[1 - r][p], epoch, 1 - r);
        m.read(ids[1 - r][p], epoch);
    };
    w.thread("home@0", 0, 0, [=](Mem& m) {
        for (uint32_t epoch = 1; epoch <= launches; ++epoch) {
            exchange(m, 0, epoch);
            if (waits) {
                m.poll([&] { return PartialsReady::ready(m, ready, epoch); });
                m.read(partial, epoch);
            }
            m.launch_boundary(phase[epoch].boundary0);
        }
    });
    w.thread("dispatch@1", 1, 0, [=](Mem& m) {
        for (uint32_t epoch = 1; epoch <= launches; ++epoch) {
            exchange(m, 1, epoch);
            GridBarrier::arrive_and_wait(m, arrivals, generation, 2);
            m.write(plan, epoch);
            if (zeroed)
                for (int c : {rows_ready, done1, done2}) m.plain_store(c, 0);
            GridBarrier::arrive_and_wait(m, arrivals, generation, 2);
            m.sync(phase[epoch].planned);
            XReady::await(m, staged, epoch, 0);
            m.write(row, m.read(x, epoch));
            RowsReady::publish(m, rows_ready, 1);
            m.launch_boundary(phase[epoch].boundary1);
        }
    });
    w.thread("load_a@1", 1, 0, [=](Mem& m) {
        for (uint32_t epoch = 1; epoch <= launches; ++epoch) {
            m.sync(phase[epoch].planned);
            m.read(plan, epoch);
            RowsReady::await(m, rows_ready, 1, 0);
            m.tma_load(row, epoch), m.tma_store(tile, epoch);
            m.arrive_tma(phase[epoch].full1);
            HReady::await(m, done1, 1, 0);
            m.tma_load(h, epoch), m.tma_load(h_scale, epoch);
            m.arrive_tma(phase[epoch].full2);
            m.launch_boundary(phase[epoch].boundary1);
        }
    });
    w.thread("math@1", 1, 0, [=](Mem& m) {
        for (uint32_t epoch = 1; epoch <= launches; ++epoch) {
            const Phase& now = phase[epoch];
            m.sync(now.planned);
            m.wait(now.full1);
            m.write(chunk, m.read(tile, epoch));
            m.write(h_scale, epoch);
            m.fence_proxy_async_shared();
            m.arrive(now.output1);
            m.wait(now.full2), m.wait(now.empty);
            m.write(chunk, epoch);
            m.fence_proxy_async_shared();
            m.arrive(now.output2);
            m.launch_boundary(now.boundary1);
        }
    });
    w.thread("store@1", 1, 0, [=](Mem& m) {
        for (uint32_t epoch = 1; epoch <= launches; ++epoch) {
            const Phase& now = phase[epoch];
            m.sync(now.planned);
            m.wait(now.output1);
            m.tma_load(chunk, epoch), m.tma_store(h, epoch);
            m.arrive_tma(now.empty);  // wait_group.read; the model has no weaker completion (A4)
            HReady::publish(m, done1);
            m.wait(now.output2);
            m.tma_load(chunk, epoch), m.tma_store(y_row, epoch);
            YRowsReady::publish(m, done2);
            m.launch_boundary(now.boundary1);
        }
    });
    w.thread("reduce@1", 1, 1, [=](Mem& m) {
        for (uint32_t epoch = 1; epoch <= launches; ++epoch) {
            GridBarrier::arrive_and_wait(m, arrivals, generation, 2);
            GridBarrier::arrive_and_wait(m, arrivals, generation, 2);
            m.read(plan, epoch);
            m.poll([&] { return YRowsReady::ready(m, done2, 1); });
            m.write(partial, m.read(y_row, epoch));
            PartialsReady::publish(m, ready, epoch);
            m.launch_boundary(phase[epoch].boundary1);
        }
    });
}

}  // namespace

const std::vector<Scenario> launch_scenarios = {
    {"two launches, every edge",
     whole_launch,
     {"counters are not zeroed", "combine does not wait", "one parity"},
     {{" at route_hash", not_read},
      {" at route_tokens", not_read},
      {"add of value + 1 at rows_ready", one_of_one},
      {"add of value + 1 at gemm1_done", one_of_one},
      {"add of value + 1 at gemm2_done", one_of_one},
      {"value + 1 at generation", only_grows}}},
};

}  // namespace model
