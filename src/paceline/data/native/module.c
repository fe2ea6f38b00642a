/* The Python module: whole batches with the GIL released. paceline/data/codec.py is its only user. */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "codec.h"

static const char *const REASONS[NUM_STATUSES] = {
    [OK] = "sound",
    [JPEG_TRUNCATED] = "the JPEG ends early",
    [JPEG_SYNTAX] = "not a JPEG, or a damaged one",
    [JPEG_PROGRESSIVE] = "a progressive, lossless or arithmetic JPEG",
    [JPEG_COMPONENTS] = "neither grey nor three colour components",
    [JPEG_COLOURS] = "RGB instead of YCbCr",
    [JPEG_SAMPLING] = "unusual colour sampling",
    [JPEG_HUFFMAN] = "damaged Huffman data",
    [JPEG_PRECISION] = "more than 8 bits a sample",
    [JPEG_TOO_LARGE] = "too large",
    [JPEG_RANGE] = "coefficients beyond what baseline JPEG holds",
    [RECORD_HEADER] = "the record's header is damaged",
    [RECORD_CHECKSUM] = "the record does not match its checksum",
    [RECORD_BLOCKS] = "the record's blocks are damaged",
    [CROP_BOX] = "the crop does not lie inside the image, or its output is too large or too small",
    [NO_MEMORY] = "out of memory",
};

static PyObject *codec_error;

static PyObject *refuse(Status status)
{
    if (status == NO_MEMORY)
        return PyErr_NoMemory();
    PyErr_SetString(codec_error, REASONS[status]);
    return NULL;
}

/* ---- paths ---- */

enum { PORTABLE = 0, AVX2 = 1 };

static int has_avx2(void)
{
#ifdef HAVE_AVX2_PATH
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("bmi") && __builtin_cpu_supports("bmi2") &&
           __builtin_cpu_supports("popcnt");
#else
    return 0;
#endif
}

static CropFunction *crop_function(int path)
{
#ifdef HAVE_AVX2_PATH
    if (path == AVX2)
        return crop_avx2;
#endif
    (void)path;
    return crop_portable;
}

static PyObject *paths(PyObject *Py_UNUSED(self), PyObject *Py_UNUSED(unused))
{
    return has_avx2() ? Py_BuildValue("(ss)", "portable", "avx2") : Py_BuildValue("(s)", "portable");
}

/* ---- work memory, kept between calls; taken and given back under the GIL ---- */

enum { KEPT = 64 };
static Workspace *kept[KEPT];
static int num_kept;

static Workspace *workspace_take(void)
{
    return num_kept ? kept[--num_kept] : PyMem_RawCalloc(1, sizeof(Workspace));
}

static void workspace_give(Workspace *workspace)
{
    if (num_kept < KEPT)
        kept[num_kept++] = workspace;
    else
        workspace_free(workspace);
}

/* ---- functions ---- */

static PyObject *pack(PyObject *Py_UNUSED(self), PyObject *argument)
{
    Py_buffer jpeg;
    if (PyObject_GetBuffer(argument, &jpeg, PyBUF_SIMPLE))
        return NULL;
    Coefficients image = {0};
    uint8_t *record = NULL;
    size_t length = 0;
    Status status;
    Py_BEGIN_ALLOW_THREADS
    status = jpeg_read(&image, jpeg.buf, (size_t)jpeg.len);
    if (!status) {
        size_t capacity = record_bound(&image);
        record = PyMem_RawMalloc(capacity);
        status = record ? record_pack(&image, record, capacity, &length) : NO_MEMORY;
    }
    coefficients_free(&image);
    Py_END_ALLOW_THREADS
    PyBuffer_Release(&jpeg);
    PyObject *result = status ? refuse(status) : PyBytes_FromStringAndSize((const char *)record, (Py_ssize_t)length);
    PyMem_RawFree(record);
    return result;
}

/* A record and the OVERRUN bytes behind it that the readers may touch: a copy, since only shards have those. */
static uint8_t *record_copy(const Py_buffer *record)
{
    uint8_t *copy = PyMem_RawMalloc((size_t)record->len + OVERRUN);
    if (copy) {
        memcpy(copy, record->buf, (size_t)record->len);
        memset(copy + record->len, 0, OVERRUN);
    }
    return copy;
}

static Status verify(const uint8_t *record, size_t length, int portable)
{
    RecordHeader header;
    Status status = record_header(record, length, &header);
    if (status)
        return status;
    return record_checksum(record, length, portable) == header.checksum ? OK : RECORD_CHECKSUM;
}

static PyObject *unpack(PyObject *Py_UNUSED(self), PyObject *argument)
{
    Py_buffer record;
    if (PyObject_GetBuffer(argument, &record, PyBUF_SIMPLE))
        return NULL;
    Coefficients image = {0};
    uint8_t *jpeg = NULL, *copy = NULL;
    size_t length = 0;
    Status status;
    Py_BEGIN_ALLOW_THREADS
    copy = record_copy(&record);
    status = copy ? verify(copy, (size_t)record.len, 0) : NO_MEMORY;
    if (!status)
        status = record_unpack(copy, (size_t)record.len, &image);
    if (!status) {
        size_t capacity = jpeg_bound(&image);
        jpeg = PyMem_RawMalloc(capacity);
        status = jpeg ? jpeg_write(&image, jpeg, capacity, &length) : NO_MEMORY;
    }
    coefficients_free(&image);
    PyMem_RawFree(copy);
    Py_END_ALLOW_THREADS
    PyBuffer_Release(&record);
    PyObject *result = status ? refuse(status) : PyBytes_FromStringAndSize((const char *)jpeg, (Py_ssize_t)length);
    PyMem_RawFree(jpeg);
    return result;
}

static PyObject *describe(PyObject *Py_UNUSED(self), PyObject *argument)
{
    Py_buffer record;
    if (PyObject_GetBuffer(argument, &record, PyBUF_SIMPLE))
        return NULL;
    RecordHeader header = {0};
    Status status;
    Py_BEGIN_ALLOW_THREADS
    status = verify(record.buf, (size_t)record.len, 0);
    if (!status)
        memcpy(&header, record.buf, sizeof header);
    Py_END_ALLOW_THREADS
    PyBuffer_Release(&record);
    return status ? refuse(status) : Py_BuildValue("(iii)", header.width, header.height, header.num_components);
}

/* crop(shards, places, boxes, out, width, height, path, luma_only) -> [(number, reason), ...] of what failed
 *
 * shards: buffers; places: int64 (n, 3) of shard, offset, length; boxes: int32 (n, 5) of x, y, width, height, mirrored;
 * out: n x 3 x height x width bytes, left as it was where a record is refused. */
static PyObject *crop(PyObject *Py_UNUSED(self), PyObject *args)
{
    PyObject *shard_list, *failures = NULL;
    Py_buffer places = {0}, boxes = {0}, out = {0}, *shards = NULL;
    int width, height, path, luma_only;
    if (!PyArg_ParseTuple(args, "O!y*y*w*iiip", &PyTuple_Type, &shard_list, &places, &boxes, &out, &width, &height, &path,
                          &luma_only))
        return NULL;
    Py_ssize_t num_shards = PyTuple_GET_SIZE(shard_list), opened = 0, num = places.len / (Py_ssize_t)(3 * sizeof(int64_t));
    size_t image_bytes = 3 * (size_t)(width > 0 ? width : 0) * (size_t)(height > 0 ? height : 0);
    Workspace *workspace = NULL;
    Status *statuses = NULL;
    if (places.len != num * (Py_ssize_t)(3 * sizeof(int64_t)) || boxes.len != num * (Py_ssize_t)(5 * sizeof(int32_t)) ||
        width > MAX_OUTPUT || height > MAX_OUTPUT || (size_t)out.len != (size_t)num * image_bytes ||
        (path == AVX2 && !has_avx2())) {
        PyErr_SetString(PyExc_ValueError, "sizes of places, boxes and out do not fit, or there is no such path");
        goto done;
    }
    shards = PyMem_Calloc((size_t)num_shards + 1, sizeof *shards);
    statuses = PyMem_Calloc((size_t)num + 1, sizeof *statuses);
    workspace = workspace_take();
    if (!shards || !statuses || !workspace) {
        PyErr_NoMemory();
        goto done;
    }
    for (; opened < num_shards; opened++)
        if (PyObject_GetBuffer(PyTuple_GET_ITEM(shard_list, opened), &shards[opened], PyBUF_SIMPLE))
            goto done;
    CropFunction *function = crop_function(path);
    Py_BEGIN_ALLOW_THREADS
    for (Py_ssize_t i = 0; i < num; i++) {
        int64_t place[3];
        int32_t box[5];
        memcpy(place, (const uint8_t *)places.buf + i * (Py_ssize_t)sizeof place, sizeof place);
        memcpy(box, (const uint8_t *)boxes.buf + i * (Py_ssize_t)sizeof box, sizeof box);
        if (place[0] < 0 || place[0] >= num_shards || place[1] < 0 || place[2] < 0 ||
            place[1] > shards[place[0]].len - OVERRUN || place[2] > shards[place[0]].len - OVERRUN - place[1]) {
            statuses[i] = RECORD_HEADER;
            continue;
        }
        const uint8_t *record = (const uint8_t *)shards[place[0]].buf + place[1];
        Crop wanted = {box[0], box[1], box[2], box[3], box[4], width, height, luma_only};
        statuses[i] = verify(record, (size_t)place[2], path == PORTABLE);
        if (!statuses[i])
            statuses[i] = function(workspace, record, (size_t)place[2], &wanted, (uint8_t *)out.buf + (size_t)i * image_bytes);
    }
    Py_END_ALLOW_THREADS
    failures = PyList_New(0);
    for (Py_ssize_t i = 0; failures && i < num; i++) {
        if (!statuses[i])
            continue;
        PyObject *failure = Py_BuildValue("(ns)", i, REASONS[statuses[i]]);
        if (!failure || PyList_Append(failures, failure))
            Py_CLEAR(failures);
        Py_XDECREF(failure);
    }
done:
    while (opened > 0)
        PyBuffer_Release(&shards[--opened]);
    if (workspace)
        workspace_give(workspace);
    PyMem_Free(statuses);
    PyMem_Free(shards);
    PyBuffer_Release(&places);
    PyBuffer_Release(&boxes);
    PyBuffer_Release(&out);
    return failures;
}

static PyMethodDef methods[] = {
    {"paths", paths, METH_NOARGS, "Names of the paths this processor can run, the last one the fastest."},
    {"pack", pack, METH_O, "A baseline JPEG to a record."},
    {"unpack", unpack, METH_O, "A record to a baseline JPEG with the same coefficients."},
    {"describe", describe, METH_O, "Verify a record; its width, height and number of components."},
    {"crop", crop, METH_VARARGS, "Crops of many records, resized, into one buffer; what failed and why."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, .m_name = "_native", .m_doc = "Paceline's codec.", .m_size = -1, .m_methods = methods,
};

PyMODINIT_FUNC PyInit__native(void)
{
    PyObject *module = PyModule_Create(&definition);
    codec_error = PyErr_NewException("paceline.data._native.CodecError", PyExc_ValueError, NULL);
    if (!module || !codec_error || PyModule_AddObjectRef(module, "CodecError", codec_error) ||
        PyModule_AddIntConstant(module, "OVERRUN", OVERRUN) || PyModule_AddIntConstant(module, "MAX_OUTPUT", MAX_OUTPUT)) {
        Py_XDECREF(module);
        return NULL;
    }
    return module;
}
