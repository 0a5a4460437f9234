// A counted suffix tree of token sequences: attar/runtime/speculate/suffix_tree.py compiled, with the same drafts.
//
//     node         a string of at most D tokens that occurs in the texts; count: how often
//     append       the strings that end at the new token get one more occurrence: O(longest that occurred before)
//     remove       the strings of a text lose one; those left with none are freed
//     leaf         a string that occurs once has no nodes below it: its continuation is read from its text, and
//                  becomes a node when the string occurs again. So a token takes few nodes, not D
//     p            of a child: count / sum of its siblings' counts, with its own; of a draft: the product on its path
//
// Children are looked up in one hash table (parent, token), and listed by when they last occurred, the latest first.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <new>
#include <stdexcept>
#include <vector>

namespace {

using Int = std::int32_t;

constexpr Int NONE = -1, ROOT = 0;
constexpr Int LEVELS = 32;                // of a group of kinds: draft.py
constexpr Int GROUP = 64, GROUPS = 4;     // suffix_tree.py: the first group, and groups of a tree
constexpr Int BOUNDS[] = {2, 3, 4, 5, 7, 10, 15};  // suffix_tree.py: least lengths of levels 2, 3, ...

struct Node {
    Int token, count, parent;
    Int child, next, before;  // the latest child; siblings
    Int text, offset;         // of a leaf: where its one occurrence goes on; of others NONE
};

struct Text {
    std::vector<Int> tokens;
    std::vector<Int> active;  // the node of the string from each of the last D starts to the end, by start % D
};

// A string that occurs: a node, or, in the continuation of a leaf, the token after it.
struct Place {
    Int node, text, offset;
};

struct Draft {
    double score = 0;
    std::vector<Int> tokens, parents, kinds;
};

class SuffixTree {
public:
    SuffixTree(Int depth, double factor, double least, const Int* ends, std::int64_t count)
        : depth_(depth), factor_(factor), least_(least), ends_(ends, ends + count), table_(64, NONE) {
        nodes_.push_back({NONE, 0, NONE, NONE, NONE, NONE, NONE, NONE});
    }

    std::int64_t size() const { return std::int64_t(nodes_.size() - free_.size()) - 1; }

    Int begin() {
        Int text = Int(texts_.size());
        if (!unused_.empty()) {
            text = unused_.back();
            unused_.pop_back();
        } else {
            texts_.emplace_back();
        }
        texts_[text].active.assign(depth_, ROOT);
        return text;
    }

    void extend(Int text, const Int* tokens, std::int64_t count) {
        for (std::int64_t i = 0; i < count; i++) append(text, tokens[i]);
    }

    const std::vector<Int>& tokens(Int text) const { return texts_.at(text).tokens; }

    // How often a string of at most D tokens occurs.
    Int count(const Int* string, Int length) const {
        Place at{};
        return !matches(string + length, length, at) ? 0 : at.text != NONE ? 1 : nodes_[at.node].count;
    }

    void remove(Int text) {
        std::vector<Int>& tokens = texts_.at(text).tokens;
        for (std::size_t start = 0; start < tokens.size(); start++) {
            Int at = ROOT;
            for (std::size_t i = start; i < std::min(tokens.size(), start + depth_); i++) {
                Int child = find(at, tokens[i]);
                if (nodes_[child].count == 1) {  // this occurrence's own, with all below it
                    while (child != NONE) {
                        const Int below = nodes_[child].child;
                        release(child);
                        child = below;
                    }
                    break;
                }
                nodes_[child].count--;
                at = child;
            }
        }
        tokens = {};
        unused_.push_back(text);
    }

    // The best draft after a text, from its own occurrences. Returns the tokens of the longest match.
    Int draft(Int number, Int most, Draft& best) {
        const Text& text = texts_[number];
        const Int size = Int(text.tokens.size()), limit = std::min(size, depth_ - 1);
        Int longest = 0;
        while (longest < limit && nodes_[suffix(text, longest + 1)].child != NONE) longest++;  // a leaf is at the end
        for (Int length = longest; length > 0; length--)
            if (!better(text.tokens, {suffix(text, length), NONE, NONE}, length, most, 0, best)) break;
        return longest;
    }

    // The same after the last tokens of a context of another tree, if the match is longer than `shorter` tokens, and
    // the score above that of `best`.
    void draft(const std::vector<Int>& context, Int most, Int shorter, Draft& best) {
        const Int* end = context.data() + context.size();
        const Int limit = Int(std::min<std::size_t>(context.size(), depth_ - 1));
        Place at{};
        const auto occurs = [&](Int length) { return matches(end, length, at) && goes_on(at); };
        Int low = shorter, high = low + 1;  // the longest match is shorter than `high`
        while (high <= limit && occurs(high)) {
            high += high - shorter;
            low = (high + shorter) / 2;
        }
        high = std::min(high, limit + 1);
        while (low + 1 < high) (occurs((low + high) / 2) ? low : high) = (low + high) / 2;
        for (Int length = low; length > shorter; length--) {
            matches(end, length, at);
            if (!better(context, at, length, most, 1, best)) break;
        }
    }

private:
    struct Item {
        double p;
        Int order, parent, token, kind;
        Place at;
        bool operator<(const Item& other) const {
            return p != other.p ? p < other.p : order > other.order;
        }
    };

    Int depth_;
    double factor_, least_;
    std::vector<Int> ends_;
    std::vector<Node> nodes_;
    std::vector<Int> free_, table_;  // table_: open addressing
    std::vector<Text> texts_;
    std::vector<Int> unused_;
    std::vector<Item> heap_;
    std::vector<Int> depths_;  // of the nodes of grown_, from 0 on
    Draft grown_;

    void append(Int number, Int token) {
        Text& text = texts_.at(number);
        const Int n = Int(text.tokens.size());
        text.tokens.push_back(token);
        text.active[n % depth_] = ROOT;
        for (Int start = n; start >= std::max(0, n - depth_ + 1); start--) {
            Int& at = text.active[start % depth_];
            if (nodes_[at].text != NONE) break;  // a leaf, as all longer ones: their one occurrence is this one
            Int child = find(at, token);
            if (child == NONE) {
                child = create(at, token, number, n + 1);
            } else {
                nodes_[child].count++;
                to_front(child);
                if (nodes_[child].text != NONE) split(child, n - start + 1);
            }
            at = child;
        }
    }

    // A leaf occurs again: the continuation of its first occurrence becomes a leaf below it.
    void split(Int leaf, Int depth) {
        const Int number = nodes_[leaf].text, offset = nodes_[leaf].offset;
        nodes_[leaf].text = nodes_[leaf].offset = NONE;
        Text& text = texts_[number];
        const Int size = Int(text.tokens.size()), start = offset - depth;
        if (depth == depth_ || offset >= size) return;
        const Int child = create(leaf, text.tokens[offset], number, offset + 1);
        Int& at = text.active[start % depth_];
        if (start >= size - depth_ && at == leaf) at = child;
    }

    Int create(Int parent, Int token, Int text, Int offset) {
        Int node = Int(nodes_.size());
        if (free_.empty()) {
            nodes_.emplace_back();
        } else {
            node = free_.back();
            free_.pop_back();
        }
        const Int next = nodes_[parent].child;
        nodes_[node] = {token, 1, parent, NONE, next, NONE, text, offset};
        if (next != NONE) nodes_[next].before = node;
        nodes_[parent].child = node;
        if (2 * std::size_t(size()) > table_.size()) {
            std::vector<Int> old(2 * table_.size(), NONE);
            old.swap(table_);
            for (Int one : old)
                if (one != NONE) insert(one);
        }
        insert(node);
        return node;
    }

    void unlink(Int node) {
        const Node& one = nodes_[node];
        if (one.before != NONE) nodes_[one.before].next = one.next;
        else nodes_[one.parent].child = one.next;
        if (one.next != NONE) nodes_[one.next].before = one.before;
    }

    void to_front(Int node) {
        if (nodes_[node].before == NONE) return;
        unlink(node);
        Node& parent = nodes_[nodes_[node].parent];
        nodes_[node].before = NONE;
        nodes_[node].next = parent.child;
        nodes_[parent.child].before = node;
        parent.child = node;
    }

    void release(Int node) {
        erase(node);
        unlink(node);
        free_.push_back(node);
    }

    std::size_t home(Int parent, Int token) const {
        std::uint64_t key = std::uint64_t(std::uint32_t(parent)) << 32 | std::uint32_t(token);
        key *= 0x9E3779B97F4A7C15;
        return (key ^ key >> 32) & (table_.size() - 1);
    }

    Int find(Int parent, Int token) const {
        for (std::size_t i = home(parent, token); table_[i] != NONE; i = (i + 1) & (table_.size() - 1)) {
            const Node& node = nodes_[table_[i]];
            if (node.parent == parent && node.token == token) return table_[i];
        }
        return NONE;
    }

    void insert(Int node) {
        std::size_t i = home(nodes_[node].parent, nodes_[node].token);
        while (table_[i] != NONE) i = (i + 1) & (table_.size() - 1);
        table_[i] = node;
    }

    // Entries behind the gap move into it unless their home lies between.
    void erase(Int node) {
        const std::size_t mask = table_.size() - 1;
        std::size_t gap = home(nodes_[node].parent, nodes_[node].token);
        while (table_[gap] != node) gap = (gap + 1) & mask;
        for (std::size_t i = (gap + 1) & mask; table_[i] != NONE; i = (i + 1) & mask) {
            const std::size_t from = home(nodes_[table_[i]].parent, nodes_[table_[i]].token);
            if (((i - from) & mask) < ((i - gap) & mask)) continue;
            table_[gap] = table_[i];
            gap = i;
        }
        table_[gap] = NONE;
    }

    bool matches(const Int* end, Int length, Place& at) const {
        at = {ROOT, NONE, NONE};
        for (const Int* token = end - length; token < end; token++) {
            if (at.text != NONE) {
                const std::vector<Int>& tokens = texts_[at.text].tokens;
                if (at.offset >= Int(tokens.size()) || tokens[at.offset++] != *token) return false;
            } else {
                const Int child = find(at.node, *token);
                if (child == NONE) return false;
                at = {child, nodes_[child].text, nodes_[child].offset};
            }
        }
        return true;
    }

    bool goes_on(const Place& at) const {
        return at.text == NONE ? nodes_[at.node].child != NONE : at.offset < Int(texts_[at.text].tokens.size());
    }

    // The node of the last tokens of a text, at most D - 1; of a string that occurs once, of a beginning of it.
    Int suffix(const Text& text, Int length) const {
        return text.active[(Int(text.tokens.size()) - length) % depth_];
    }

    // Whether a match can still have a better draft than `best`, which then becomes the better of the two.
    bool better(const std::vector<Int>& context, const Place& match, Int length, Int most, Int group, Draft& best) {
        const Int limit = std::min(most, Int(factor_ * length));
        if (best.score >= limit) return false;  // a score is at most the number of drafts
        grow(context, match, length, limit, group);
        if (grown_.score > best.score) std::swap(grown_, best);
        return true;
    }

    // At most `limit` drafts after a match, the likeliest first.
    void grow(const std::vector<Int>& context, const Place& match, Int length, Int limit, Int group) {
        grown_.score = 0;
        grown_.tokens.clear();
        grown_.parents.clear();
        grown_.kinds.clear();
        heap_.clear();
        depths_.assign(1, 0);
        Int order = 0;
        push(context, match, 1.0, 0, length, group, order);
        while (!heap_.empty() && Int(grown_.tokens.size()) < limit) {
            std::pop_heap(heap_.begin(), heap_.end());
            const Item one = heap_.back();
            heap_.pop_back();
            grown_.tokens.push_back(one.token);
            grown_.parents.push_back(one.parent);
            grown_.kinds.push_back(one.kind);
            grown_.score += one.p;
            depths_.push_back(depths_[one.parent] + 1);
            const Int deeper = length + depths_.back();
            if (deeper < depth_ && std::find(ends_.begin(), ends_.end(), one.token) == ends_.end())
                push(context, one.at, one.p, Int(grown_.tokens.size()), deeper, group, order);
        }
    }

    // The children of a place, `length` tokens from the beginning of the match.
    void push(const std::vector<Int>& context, const Place& at, double p, Int parent, Int length, Int group,
              Int& order) {
        if (at.text != NONE) {
            const std::vector<Int>& tokens = texts_[at.text].tokens;
            const Int ahead = at.offset - Int(tokens.size());
            if (ahead >= 0 && (&tokens != &context || ahead >= depths_[parent])) return;
            add({p, order++, parent, ahead < 0 ? tokens[at.offset] : drafted(parent, ahead),
                 kind(1, 1, length, group), {at.node, at.text, at.offset + 1}});
            return;
        }
        Int total = 0;
        for (Int child = nodes_[at.node].child; child != NONE; child = nodes_[child].next) total += nodes_[child].count;
        for (Int child = nodes_[at.node].child; child != NONE; child = nodes_[child].next) {
            const Node& one = nodes_[child];
            const double below = p * (double(one.count) / double(total));
            if (below >= least_)
                add({below, order++, parent, one.token, kind(one.count, total, length, group),
                     {child, one.text, one.offset}});
        }
    }

    // The token of a node's path at an index: what follows the end of the context, where a draft goes on past it.
    Int drafted(Int node, Int index) const {
        while (depths_[node] > index + 1) node = grown_.parents[node - 1];
        return grown_.tokens[node - 1];
    }

    void add(const Item& item) {
        heap_.push_back(item);
        std::push_heap(heap_.begin(), heap_.end());
    }

    static Int kind(Int count, Int total, Int length, Int group) {
        const Int share = total == 1 ? 0 : count == total ? 1 : 2 * count >= total ? 2 : 3;
        Int level = 1;
        for (Int bound : BOUNDS) level += length >= bound;
        return (GROUP + group * GROUPS + share) * LEVELS + level;
    }
};

// -1: no memory; -2: a text that the tree does not have.
template <typename Call>
std::int64_t guarded(Call call) {
    try {
        return call();
    } catch (const std::bad_alloc&) {
        return -1;
    } catch (const std::out_of_range&) {
        return -2;
    }
}

}  // namespace

extern "C" {

void* attar_suffix_tree(Int depth, double factor, double least, const Int* ends, std::int64_t count) {
    try {
        return new SuffixTree(depth, factor, least, ends, count);
    } catch (const std::bad_alloc&) {
        return nullptr;
    }
}

void attar_suffix_free(void* tree) { delete static_cast<SuffixTree*>(tree); }

std::int64_t attar_suffix_size(const void* tree) { return static_cast<const SuffixTree*>(tree)->size(); }

std::int64_t attar_suffix_count(const void* tree, const Int* string, std::int64_t length) {
    return static_cast<const SuffixTree*>(tree)->count(string, Int(length));
}

std::int64_t attar_suffix_begin(void* tree) {
    return guarded([&] { return static_cast<SuffixTree*>(tree)->begin(); });
}

std::int64_t attar_suffix_extend(void* tree, std::int64_t text, const Int* tokens, std::int64_t count) {
    return guarded([&] { return static_cast<SuffixTree*>(tree)->extend(Int(text), tokens, count), 0; });
}

std::int64_t attar_suffix_remove(void* tree, std::int64_t text) {
    return guarded([&] { return static_cast<SuffixTree*>(tree)->remove(Int(text)), 0; });
}

// Extends a text by new tokens, then writes a draft after it, from its own tree or from `others` (may be null): n
// tokens, parents and kinds, `most` apart. Returns n.
std::int64_t attar_suffix_draft(void* tree, std::int64_t text, const Int* tokens, std::int64_t count, void* others,
                                std::int64_t most, Int* out) {
    return guarded([&]() -> std::int64_t {
        SuffixTree& own = *static_cast<SuffixTree*>(tree);
        own.extend(Int(text), tokens, count);
        static thread_local Draft best;
        best.score = 0;
        best.tokens.clear();
        best.parents.clear();
        best.kinds.clear();
        const std::vector<Int>& context = own.tokens(Int(text));
        const Int length = own.draft(Int(text), Int(most), best);
        if (others) static_cast<SuffixTree*>(others)->draft(context, Int(most), length, best);
        std::copy(best.tokens.begin(), best.tokens.end(), out);
        std::copy(best.parents.begin(), best.parents.end(), out + most);
        std::copy(best.kinds.begin(), best.kinds.end(), out + 2 * most);
        return std::int64_t(best.tokens.size());
    });
}
}
