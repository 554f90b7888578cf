/* Tests of k_gdn_delta: every body against an f64 recurrence (itself checked against a host
 * loop), with poisoned outputs, workspace and slots; and bits: between bodies, alone against in
 * a batch, cut at multiples of 64, kept inside of a piece. `small` as first argument: sizes for
 * compute-sanitizer. */
#include "gdn_case.cuh"

/* Four roundings to bf16 on the way to an output (S, Vn, P, O), each 2^-9 / sqrt(3) rms =
 * 1.13e-3: 2.3e-3 together; twice that, as correlated errors add up. */
static const double TOL_OUT = 4.6e-3;
/* A state sums many such terms: S and Vn roundings; the same bound. */
static const double TOL_STATE = 4.6e-3;
/* What the better peer of ../shared/peers.md is measured at with fast and with slow gates, to
 * the two places it is given with. */
static const double PEER_OUT[2] = {2.95e-3, 3.65e-3};

static struct k_device dev;
static std::vector<int> bodies;

static void check_case(const char *name, int H, int HV, const std::vector<int> &lens, int gates,
                       uint64_t seed, float common = 0)
{
    gdn_case c;
    c.make(H, HV, lens, gates, seed, common);
    std::vector<double> o_ref, S_ref;
    c.reference(&o_ref, &S_ref);
    size_t slot_n = (size_t)HV * 16384;
    std::vector<bf16> first_o;
    std::vector<std::vector<float>> first_s;
    for (int body : bodies) {
        c.run(&dev, body);
        std::vector<bf16> o = c.o.get(0, o_ref.size());
        std::vector<std::vector<float>> s;
        double worst_s = 0;
        for (size_t i = 0; i < lens.size(); i++) {
            s.push_back(c.state((int)i));
            std::vector<double> want(S_ref.begin() + i * slot_n,
                                     S_ref.begin() + (i + 1) * slot_n);
            double e = rel_error(s.back(), want);
            worst_s = e > worst_s || e != e ? e : worst_s;
        }
        double e = rel_error(o, o_ref);
        result(e <= TOL_OUT && worst_s <= TOL_STATE, "%s %d/%d %s: out %.2e state %.2e", name,
               H, HV, body_name(body), e, worst_s);
        if (body == bodies[0]) {
            first_o = o, first_s = s;
            continue;
        }
        size_t diff = 0;
        for (size_t i = 0; i < o.size(); i++)
            diff += memcmp(&o[i], &first_o[i], 2) != 0;
        bool same_s = true;
        for (size_t i = 0; i < s.size(); i++)
            same_s &= memcmp(s[i].data(), first_s[i].data(), s[i].size() * 4) == 0;
        result(diff == 0 && same_s,
               "%s %d/%d %s: same bits as %s (%zu of %zu differ, state %s)", name, H, HV,
               body_name(body), body_name(bodies[0]), diff, o.size(),
               same_s ? "same" : "differs");
    }
}

/* The output's error in steps of ../shared/peers.md, by the body that the launcher picks. */
static void check_accuracy(const char *name, const std::vector<int> &lens, uint64_t seed)
{
    double e[2];
    for (int gates = 0; gates < 2; gates++) {
        gdn_case c;
        c.make(16, 32, lens, gates, seed + gates);
        std::vector<double> o_ref, S_ref;
        c.reference(&o_ref, &S_ref);
        c.run(&dev, K_GDN_AUTO);
        e[gates] = rel_error(c.o.get(0, o_ref.size()), o_ref);
    }
    result(
        e[0] <= PEER_OUT[0] && e[1] <= PEER_OUT[1],
        "accuracy 16/32 %s: %.2e with fast gates, %.2e with slow ones (peers 2.9e-3, 3.6e-3)",
        name, e[0], e[1]);
}

/* Tokens at .. at + n - 1 of `from` become those from to_tok on of `to`. */
static void copy_sequence(gdn_case &to, size_t to_tok, gdn_case &from, size_t at, size_t n)
{
    size_t H = from.H, HV = from.HV;
    auto copy = [&](auto &dst, auto &src, size_t row) {
        CU(cudaMemcpy(dst.p + to_tok * row, src.p + at * row, n * row * sizeof(*dst.p),
                      cudaMemcpyDeviceToDevice));
    };
    copy(to.q, from.q, H * 128), copy(to.k, from.k, H * 128), copy(to.v, from.v, HV * 128);
    copy(to.g, from.g, HV), copy(to.beta, from.beta, HV);
}

/* Sequence 1 of a batch, alone and cut into two pieces at `cut`, must give the same bits. */
static void check_bits(int body, int cut)
{
    const int H = 2, HV = 4;
    gdn_case all;
    all.make(H, HV, {70, 300, 5, 129}, 1, 11);
    all.run(&dev, body);
    size_t t0 = 70, n = 300, rv = HV * 128;
    std::vector<bf16> want = all.o.get(t0 * rv, n * rv);
    std::vector<float> want_s = all.state(1);

    gdn_case one;
    std::vector<int> pieces =
        cut ? std::vector<int>{cut, (int)n - cut} : std::vector<int>{(int)n};
    size_t at = 0;
    std::vector<bf16> got;
    std::vector<float> state = all.S0.get((size_t)all.slot[1] * HV * 16384, HV * 16384);
    for (int len : pieces) {
        one.make(H, HV, {3, len}, 1, 55);
        copy_sequence(one, 3, all, t0 + at, len);
        CU(cudaMemcpy(one.S0.p + (size_t)one.slot[1] * HV * 16384, state.data(),
                      state.size() * 4, cudaMemcpyHostToDevice));
        one.run(&dev, body);
        std::vector<bf16> o = one.o.get(3 * rv, len * rv);
        got.insert(got.end(), o.begin(), o.end());
        state = one.state(1);
        at += len;
    }
    bool ok = memcmp(got.data(), want.data(), want.size() * 2) == 0 &&
              memcmp(state.data(), want_s.data(), state.size() * 4) == 0;
    result(ok, "bits %s: in a batch = elsewhere, cut at %d", body_name(body), cut);
}

/* Counts rounded up: the batch without its last sequence, whose tokens stay as rows beyond the
 * end, with empty sequences that share slot 0, chunks beyond the map's and twice on one
 * workspace. The others keep their bits, the rows beyond and slot 0 what they held. */
static void check_padding(int body)
{
    const int HV = 2, n = 3, n_empty = 3;
    gdn_case all;
    all.make(1, HV, {9000, 70, 65, 200}, 1, 31);
    all.run(&dev, body);
    size_t T = 9135, row = HV * 128, slot_n = (size_t)HV * 16384;
    std::vector<bf16> want = all.o.get(0, T * row);
    std::vector<float> want_s[n];
    for (int i = 0; i < n; i++)
        want_s[i] = all.state(i);

    batch_dev padded;
    std::vector<int> start(all.start.begin(), all.start.begin() + n);
    std::vector<int> slot(all.slot.begin(), all.slot.begin() + n);
    start.insert(start.end(), n_empty, 1), slot.insert(slot.end(), n_empty, 0);
    padded.make({9000, 70, 65, 0, 0, 0}, start, slot, 200, 7);
    all.work.make(k_gdn_delta_work_bytes(padded.b.n_chunks, HV) + 128);
    all.work.poison();
    CU(k_gdn_work_init(all.work.p, all.work.n, 0));
    std::vector<float> zero = all.S.get(0, slot_n);
    bool ok = true;
    for (int turn = 0; turn < 2; turn++) {
        all.o.poison();
        for (int i = 0; i < n; i++)
            CU(cudaMemcpy(all.S.p + slot[i] * slot_n, all.S0.p + slot[i] * slot_n, slot_n * 4,
                          cudaMemcpyDeviceToDevice));
        struct k_gdn_delta a = all.args(&dev, body);
        std::vector<bf16> beyond = all.o.get(T * row, 200 * row);
        a.b = padded.b;
        CU(k_gdn_delta(&a, 0));
        CU(cudaDeviceSynchronize());
        std::vector<bf16> got = all.o.get(0, T * row), rest = all.o.get(T * row, 200 * row);
        ok = ok && memcmp(got.data(), want.data(), want.size() * 2) == 0 &&
             memcmp(rest.data(), beyond.data(), rest.size() * 2) == 0 &&
             memcmp(all.S.get(0, slot_n).data(), zero.data(), slot_n * 4) == 0;
        for (int i = 0; i < n; i++)
            ok = ok && memcmp(all.state(i).data(), want_s[i].data(), slot_n * 4) == 0;
    }
    result(ok, "padding %s: counts rounded up change nothing", body_name(body));
}

/* The state behind each `every`-th whole chunk, kept in a slot of its own: the bits of a piece
 * that ends there; all else has the bits of a run that keeps none, and no other slot is
 * touched. */
static void check_kept(int body, const std::vector<int> &lens, int every)
{
    const int H = 1, HV = 4, n = (int)lens.size();
    const size_t slot_n = (size_t)HV * 16384;
    std::vector<int> at_seq, at_chunk; /* of what is kept */
    gdn_case all;
    for (int i = 0; i < n; i++)
        for (int c = every - 1; c < lens[i] / 64; c += every)
            at_seq.push_back(i), at_chunk.push_back(c);
    all.n_more = (int)at_seq.size();
    all.make(H, HV, lens, 1, 71);
    size_t T = all.batch.b.n_tokens;
    all.run(&dev, body);
    std::vector<bf16> want = all.o.get(0, T * HV * 128);
    std::vector<std::vector<float>> want_s;
    std::vector<bool> taken(all.n_slots, false);
    for (int i = 0; i < n; i++)
        want_s.push_back(all.state(i)), taken[all.slot[i]] = true;

    std::vector<int32_t> save(all.batch.b.n_chunks, -1), first = all.batch.first.get(0, n + 1);
    std::vector<int> slots;
    for (size_t k = 0, at = 0; k < at_seq.size(); k++, at++) {
        while (taken[at])
            at++;
        slots.push_back((int)at);
        save[first[at_seq[k]] + at_chunk[k]] = (int32_t)at;
    }
    all.batch.save(save);
    all.run(&dev, body);
    std::vector<bf16> got = all.o.get(0, T * HV * 128);
    bool ok = memcmp(got.data(), want.data(), want.size() * 2) == 0;
    for (int i = 0; i < n; i++)
        ok = ok && memcmp(all.state(i).data(), want_s[i].data(), slot_n * 4) == 0;
    size_t t0 = 0;
    int n_wrong = 0;
    for (size_t k = 0; k < slots.size(); k++) {
        int seq = at_seq[k], len = 64 * (at_chunk[k] + 1);
        t0 = 0;
        for (int i = 0; i < seq; i++)
            t0 += lens[i];
        gdn_case one; /* an odd sequence continues a state, an even one is fresh */
        one.make(H, HV, seq & 1 ? std::vector<int>{3, len} : std::vector<int>{len}, 1, 72);
        copy_sequence(one, seq & 1 ? 3 : 0, all, t0, len);
        int mine = seq & 1;
        CU(cudaMemcpy(one.S0.p + one.slot[mine] * slot_n, all.S0.p + all.slot[seq] * slot_n,
                      slot_n * 4, cudaMemcpyDeviceToDevice));
        one.run(&dev, body);
        auto kept = all.S.get(slots[k] * slot_n, slot_n), cut = one.state(mine);
        n_wrong += memcmp(kept.data(), cut.data(), slot_n * 4) != 0;
        taken[slots[k]] = true;
    }
    for (int i = 0; i < all.n_slots; i++)
        if (!taken[i])
            for (float x : all.S.get(i * slot_n, slot_n))
                ok = ok && x != x;
    result(ok && n_wrong == 0 && !slots.empty(),
           "kept %s, longest of %d tokens: %zu states inside of pieces, %d wrong, the rest %s",
           body_name(body), all.batch.b.max_len, slots.size(), n_wrong,
           ok ? "same" : "DIFFERS");
}

/* NaN in one request must not reach its neighbours. */
static void check_isolation(int body)
{
    gdn_case c;
    c.make(2, 4, {70, 65, 100}, 0, 21);
    c.run(&dev, body);
    std::vector<bf16> want = c.o.get(0, 235 * 512);
    CU(cudaMemset(c.k.p + 70 * 256, 0xff, 65 * 256 * 2));
    CU(cudaMemset(c.q.p + 70 * 256, 0xff, 65 * 256 * 2));
    CU(cudaMemset(c.v.p + 70 * 512, 0xff, 65 * 512 * 2));
    CU(cudaMemset(c.g.p + 70 * 4, 0xff, 65 * 4 * 4));
    c.run(&dev, body);
    std::vector<bf16> got = c.o.get(0, 235 * 512);
    bool ok = memcmp(got.data(), want.data(), 70 * 512 * 2) == 0 &&
              memcmp(got.data() + 135 * 512, want.data() + 135 * 512, 100 * 512 * 2) == 0;
    result(ok, "isolation %s: NaN in one request stays there", body_name(body));
}

/* More than 2^31 elements of v and o: the last sequence must equal itself alone. */
static void check_large(int body)
{
    const int H = 16, HV = 32, n = 1000;
    const size_t t0 = 599000;
    gdn_case big, one;
    big.make(H, HV, {(int)t0, n}, 0, 61);
    one.make(H, HV, {3, n}, 0, 62);
    copy_sequence(one, 3, big, t0, n);
    size_t slot_n = (size_t)HV * 16384;
    CU(cudaMemcpy(one.S0.p + one.slot[1] * slot_n, big.S0.p + big.slot[1] * slot_n, slot_n * 4,
                  cudaMemcpyDeviceToDevice));
    big.run(&dev, body);
    one.run(&dev, body);
    auto a = big.o.get(t0 * HV * 128, (size_t)n * HV * 128);
    auto b = one.o.get((size_t)3 * HV * 128, (size_t)n * HV * 128);
    auto sa = big.state(1), sb = one.state(1);
    result(memcmp(a.data(), b.data(), a.size() * 2) == 0 &&
               memcmp(sa.data(), sb.data(), sa.size() * 4) == 0,
           "600000 tokens x 32 heads (2.5e9 elements) %s: last sequence = alone",
           body_name(body));
}

/* The f64 kernel against a host loop, so that the reference is not its own witness. */
static void check_reference(void)
{
    gdn_case c;
    c.make(1, 2, {5, 9}, 0, 3);
    std::vector<double> o_ref, S_ref;
    c.reference(&o_ref, &S_ref);
    auto q = c.q.get(), k = c.k.get(), v = c.v.get();
    auto g = c.g.get(), beta = c.beta.get();
    double worst = 0;
    for (int h = 0; h < 2; h++)
        for (int seq = 0, t = 0; seq < 2; seq++) {
            std::vector<double> S(16384, 0.0); /* [V][K] */
            if (seq == 1) {
                auto s0 = c.S0.get(((size_t)c.slot[1] * 2 + h) * 16384, 16384);
                for (int i = 0; i < 16384; i++)
                    S[i] = s0[i];
            }
            for (int n = 0; n < c.lens[seq]; n++, t++)
                for (int x = 0; x < 128; x++) {
                    double r = 0, o = 0, e = exp((double)g[t * 2 + h]);
                    for (int i = 0; i < 128; i++)
                        r += e * S[x * 128 + i] * (float)k[t * 128 + i];
                    double d = beta[t * 2 + h] * ((float)v[(t * 2 + h) * 128 + x] - r);
                    for (int i = 0; i < 128; i++) {
                        S[x * 128 + i] = e * S[x * 128 + i] + d * (float)k[t * 128 + i];
                        o += S[x * 128 + i] * (float)q[t * 128 + i];
                    }
                    worst = fmax(worst, fabs(o - o_ref[(t * 2 + h) * 128 + x]));
                }
        }
    result(worst < 1e-12, "f64 reference kernel against a host loop: %.1e", worst);
}

/* Random batches, empty sequences among them, more heads than multiprocessors: each body again
 * and again has the portable one's bits, whichever warp of it comes first. */
static void check_again(int body, int n_worlds, int n_runs, int max_seqs)
{
    uint64_t x = 20261130;
    auto rnd = [&](int n) {
        x = x * 6364136223846793005ull + 1442695040888963407ull;
        return (int)((x >> 33) % (uint64_t)n);
    };
    static const int heads[][2] = {{1, 1}, {2, 4}, {16, 32}, {16, 48}, {1, 8}};
    int n_differ = 0;
    for (int w = 0; w < n_worlds; w++) {
        const int *h = heads[w % 5];
        std::vector<int> lens(1 + rnd(max_seqs));
        for (int &n : lens)
            n = rnd(4) == 0 ? 0 : 1 + rnd(rnd(2) ? 130 : 30 * max_seqs);
        gdn_case c;
        c.make(h[0], h[1], lens, w & 1, 100 + w);
        size_t n_o = (size_t)c.batch.b.n_tokens * h[1] * 128;
        c.run(&dev, K_GDN_PORTABLE);
        std::vector<bf16> o = c.o.get(0, n_o);
        std::vector<float> S = c.S.get(0, c.S.n);
        for (int i = 0; i < n_runs; i++) {
            c.run(&dev, body);
            std::vector<bf16> got = c.o.get(0, n_o);
            std::vector<float> got_s = c.S.get(0, c.S.n);
            n_differ += memcmp(got.data(), o.data(), n_o * sizeof(bf16)) != 0 ||
                        memcmp(got_s.data(), S.data(), S.size() * sizeof(float)) != 0;
        }
    }
    result(n_differ == 0, "%s: %d random batches, %d times each: portable bits (%d differ)",
           body_name(body), n_worlds, n_runs, n_differ);
}

int main(int argc, char **argv)
{
    bool small = argc > 1 && strcmp(argv[1], "small") == 0;
    if (!gpu_open("test_gdn", &dev))
        return 0;
    bodies = {K_GDN_PORTABLE};
    if (dev.cc == 90)
        bodies = {K_GDN_PORTABLE, K_GDN_SPLIT, K_GDN_FUSED};
    check_reference();
    check_case("T=1", 1, 1, {1}, 0, 1);
    check_case("T=65", 1, 1, {65}, 0, 4);
    check_case("130+20+300", 1, 2, {130, 20, 300}, 0, 5);
    if (!small) {
        check_case("T=63", 1, 1, {63}, 0, 2);
        check_case("T=64", 1, 1, {64}, 0, 3);
        check_case("empties", 1, 2, {0, 5, 0, 64, 128, 1, 0}, 1, 6);
        check_case("r=3", 2, 6, {200, 77}, 1, 7);
        check_case("r=4", 1, 4, {200, 77}, 0, 8);
        check_case("no decay, beta near 1, correlated keys", 1, 2, {2048}, 2, 9, 3.0f);
        check_case("decays 0 and -100", 1, 2, {1000, 30}, 3, 10);
        check_case("16/32 mix", 16, 32, {1713, 640, 64, 3, 2900, 128, 2744}, 0, 12);
        check_case("16/48", 16, 48, {500, 300}, 1, 13);
        std::vector<int> many(4096);
        for (int i = 0; i < 4096; i++)
            many[i] = 1 + i % 3;
        check_case("4096 sequences", 1, 1, many, 0, 14);
        check_case("1x8192 fast", 16, 32, {8192}, 0, 15);
        check_case("1x8192 slow", 16, 32, {8192}, 1, 16);
        check_case("1x131072 slow", 1, 2, {131072}, 1, 17);
        check_accuracy("1x131072", {131072}, 200);
        check_accuracy("1x32768", {32768}, 202);
        check_accuracy("1x8192", {8192}, 204);
        check_accuracy("1x2048", {2048}, 206);
        check_accuracy("1x512", {512}, 208);
        check_accuracy("28672+4096", {28672, 4096}, 210);
        check_accuracy("mix", {1713, 640, 64, 3, 2900, 128, 2744}, 212);
        check_accuracy("130+20+300", {130, 20, 300}, 214);
        check_accuracy("4096x8", std::vector<int>(8, 4096), 216);
        check_accuracy("1024x8", std::vector<int>(8, 1024), 218);
        check_accuracy("300x32", std::vector<int>(32, 300), 220);
        for (int body : bodies)
            if (body != K_GDN_PORTABLE)
                check_large(body);
    }
    for (int body : bodies) {
        if (body != K_GDN_PORTABLE)
            check_again(body, small ? 2 : 30, small ? 1 : 4, small ? 4 : 24);
        check_isolation(body);
        check_kept(body, {70, 300, 64, 129, 5, 0, 640}, 1);
        if (!small) /* with gdn_prep beside */
            check_kept(body, {9000}, 16);
        if (!small)
            check_padding(body);
        for (int cut : {0, 64, 192, 256})
            if (!small || cut == 64)
                check_bits(body, cut);
    }
    printf("%s test_gdn: %d failed\n", n_failed ? "FAIL" : "pass", n_failed);
    return n_failed != 0;
}
