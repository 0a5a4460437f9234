// Packs bits of codes into the bytes of ggml's blocks, and unpacks them: attar/formats/gguf/planes.py compiled.
//
//     byte j of a chunk of r bytes:  sum over i < 8 / b of  ((q[j + i r] >> t) mod 2^b) << (b i)
//
// Letters: q codes of a chunk of 8 r / b weights; b bits of each code in the plane, from bit t on; r (run)
// bytes of a chunk. Eight bytes are processed at a time where r is a multiple of 8, and eight bits where b = r = 1.

#include <cstdint>
#include <cstring>

namespace {

using Byte = std::uint8_t;
using Word = std::uint64_t;

constexpr Word ONES = 0x0101010101010101;  // a bit in each byte

struct Plane {
    std::int32_t at, bits, run, shift;
    int codes_per_byte() const { return 8 / bits; }
    Word mask() const { return ((1u << bits) - 1) * ONES; }
};

Word load(const Byte* from) {
    Word word;
    std::memcpy(&word, from, sizeof word);
    return word;
}

void store(Byte* to, Word word) { std::memcpy(to, &word, sizeof word); }

// Packs the codes of a chunk into its r bytes.
void pack_chunk(const Plane& plane, const Byte* codes, Byte* out) {
    const Byte mask = Byte(plane.mask());
    if (plane.run % 8 == 0) {
        for (int j = 0; j < plane.run; j += 8) {
            Word packed = 0;
            for (int i = 0; i < plane.codes_per_byte(); i++)
                packed |= (load(codes + i * plane.run + j) >> plane.shift & plane.mask()) << plane.bits * i;
            store(out + j, packed);
        }
    } else if (plane.run == 1 && plane.bits == 1) {  // bit i of the product's top byte is that of byte i
        *out = Byte((load(codes) >> plane.shift & ONES) * 0x0102040810204080 >> 56);
    } else {
        for (int j = 0; j < plane.run; j++) {
            Byte packed = 0;
            for (int i = 0; i < plane.codes_per_byte(); i++)
                packed |= (codes[i * plane.run + j] >> plane.shift & mask) << plane.bits * i;
            out[j] = packed;
        }
    }
}

// Adds the bits of a chunk to its codes.
void unpack_chunk(const Plane& plane, const Byte* in, Byte* codes) {
    const Byte mask = Byte(plane.mask());
    if (plane.run % 8 == 0) {
        for (int j = 0; j < plane.run; j += 8)
            for (int i = 0; i < plane.codes_per_byte(); i++) {
                Byte* to = codes + i * plane.run + j;
                store(to, load(to) | (load(in + j) >> plane.bits * i & plane.mask()) << plane.shift);
            }
    } else if (plane.run == 1 && plane.bits == 1) {  // byte i keeps bit i alone, then becomes 0 or 1
        const Word single = *in * ONES & 0x8040201008040201;
        store(codes, load(codes) | ((single + 0x7f * ONES) >> 7 & ONES) << plane.shift);
    } else {
        for (int j = 0; j < plane.run; j++)
            for (int i = 0; i < plane.codes_per_byte(); i++)
                codes[i * plane.run + j] |= (in[j] >> plane.bits * i & mask) << plane.shift;
    }
}

}  // namespace

// Codes (blocks, count) into blocks that begin `stride` bytes apart.
extern "C" void attar_planes_join(const Plane* planes, int number, std::int64_t blocks, std::int64_t count,
                                  const Byte* codes, Byte* out, std::int64_t stride) {
    for (std::int64_t block = 0; block < blocks; block++, codes += count, out += stride)
        for (int p = 0; p < number; p++) {
            const std::int64_t chunk = planes[p].run * planes[p].codes_per_byte();
            for (std::int64_t c = 0; c < count / chunk; c++)
                pack_chunk(planes[p], codes + c * chunk, out + planes[p].at + c * planes[p].run);
        }
}

// Blocks that begin `stride` bytes apart into codes (blocks, count).
extern "C" void attar_planes_cut(const Plane* planes, int number, std::int64_t blocks, std::int64_t count,
                                 const Byte* in, std::int64_t stride, Byte* codes) {
    std::memset(codes, 0, blocks * count);
    for (std::int64_t block = 0; block < blocks; block++, codes += count, in += stride)
        for (int p = 0; p < number; p++) {
            const std::int64_t chunk = planes[p].run * planes[p].codes_per_byte();
            for (std::int64_t c = 0; c < count / chunk; c++)
                unpack_chunk(planes[p], in + planes[p].at + c * planes[p].run, codes + c * chunk);
        }
}

// Adds the number of occurrences of each byte to 256 counts. Four tables, so that equal neighbours do not conflict.
extern "C" void attar_histogram(const Byte* bytes, std::int64_t count, std::int64_t* counts) {
    std::int64_t tables[4][256] = {};
    std::int64_t i = 0;
    for (; i + 4 <= count; i += 4)
        for (int table = 0; table < 4; table++) tables[table][bytes[i + table]]++;
    for (; i < count; i++) tables[0][bytes[i]]++;
    for (int byte = 0; byte < 256; byte++)
        for (int table = 0; table < 4; table++) counts[byte] += tables[table][byte];
}
