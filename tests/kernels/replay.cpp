// Calls of a compiled library, from a file: tests/kernels/replay.py writes it, and tells what is in it.
//
//     replay LIBRARY RECORDING RESULTS
//
// RESULTS: the regions that are asked for, one after the other. Exit status: 0; 1 no library or no file;
// 2 a function that the library has not; 3 a call that failed.

#include <dlfcn.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

using Word = std::int64_t;
using Function = Word (*)(Word, Word, Word, Word, Word, Word, Word, Word, Word, Word, Word, Word, Word);
constexpr int ARGUMENTS = 13;

static FILE* opened(const char* path, const char* mode) {
    FILE* file = std::fopen(path, mode);
    if (!file) std::exit(1);
    return file;
}

class Reader {
public:
    explicit Reader(const char* path) : file_(opened(path, "rb")) {}
    void bytes(void* to, std::size_t count) {
        if (count && std::fread(to, 1, count, file_) != count) std::exit(1);
    }
    Word word() {
        Word value;
        bytes(&value, sizeof value);
        return value;
    }
    std::string text() {
        std::string value(std::size_t(word()), ' ');
        bytes(value.data(), value.size());
        return value;
    }

private:
    FILE* file_;
};

struct Region {
    char* data;
    Word size;
};

int main(int count, char** names) {
    if (count != 4) return 1;
    void* library = dlopen(names[1], RTLD_NOW);
    if (!library) {
        std::fprintf(stderr, "%s\n", dlerror());
        return 1;
    }
    Reader in(names[2]);
    std::vector<Region> regions(std::size_t(in.word()));
    for (Region& region : regions) {
        region.size = in.word();
        region.data = (char*)std::aligned_alloc(64, std::size_t(region.size / 64 + 2) * 64);
        in.bytes(region.data, std::size_t(region.size));
    }
    for (Word pointers = in.word(); pointers; pointers--) {
        char* at = regions[std::size_t(in.word())].data;
        at += in.word();
        const char* to = regions[std::size_t(in.word())].data;
        to += in.word();
        std::memcpy(at, &to, sizeof to);
    }
    std::vector<Word> results;
    for (Word calls = in.word(); calls; calls--) {
        const std::string name = in.text();
        const Function function = (Function)dlsym(library, name.c_str());
        if (!function) return 2;
        const bool checked = in.word();
        Word a[ARGUMENTS];
        for (Word& argument : a) {  // a number, an offset in a region, an earlier call's result
            const Word kind = in.word(), value = in.word(), region = in.word();
            argument = kind == 0 ? value : kind == 1 ? Word(regions[std::size_t(region)].data + value) : results[std::size_t(value)];
        }
        results.push_back(function(a[0], a[1], a[2], a[3], a[4], a[5], a[6], a[7], a[8], a[9], a[10], a[11], a[12]));
        if (checked && std::int32_t(results.back())) {
            std::fprintf(stderr, "%s: %d\n", name.c_str(), int(results.back()));
            return 3;
        }
    }
    FILE* out = opened(names[3], "wb");
    for (Word wanted = in.word(); wanted; wanted--) {
        const Region& region = regions[std::size_t(in.word())];
        if (std::fwrite(region.data, 1, std::size_t(region.size), out) != std::size_t(region.size)) return 1;
    }
    return std::fclose(out) ? 1 : 0;
}
